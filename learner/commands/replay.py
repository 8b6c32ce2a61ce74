"""The process behind `prefixrl replay`: the learner alone, on the batches of a run's journal.

replay.json, RUN/journal ──▶ the loop of every learner ──▶ metrics.jsonl, checkpoints/step_N, summary.json

A process trains the part of the plan that the newest checkpoint is in: the settings of a run may have been changed on
its way. Whatever ends it, the next one goes on at the newest checkpoint.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import click

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.load import CONFIG_FILE, from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import (
    no_teardown,
    own,
    start_logging,
    stop_event,
    without_gc,
    write_atomically,
)
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.run.directory_format import note_start
from prefixrl.common.run.replay import PLAN_FILE, ReplayPart, ReplayPlan
from prefixrl.learner.processes import ranks
from prefixrl.learner.run.directory import check_learner_inputs, end_noted
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.start import collapse_of, completed_iterations, load_checkpoint


def replay(directory: Path, rank: int, rank_count: int, stopped: Callable[[], bool]) -> None:
    """Train the part of the plan that is next; UserError, TrainingFault, Halted."""
    with contextlib.ExitStack() as resources:
        if rank == 0:
            resources.enter_context(own(directory))
            resources.enter_context(end_noted(directory))
        plan = read_json(directory / PLAN_FILE, ReplayPlan)
        part = plan.part_at(completed_iterations(directory))
        config = from_json(part.config, f"the plan in {directory}")
        check_learner_inputs(config, Path(plan.source))
        _import_functions(config)
        if rank == 0:
            _adopt(directory, part, config)
        _train(plan, part, config, (rank, rank_count), StopSignal(stopped))


def _import_functions(config: RunConfig) -> None:
    """Execute the user's functions of the learner; the others are not called."""
    algorithm = config.algorithm
    if algorithm.advantage_function is not None:
        user_function.check_call("algorithm.advantage_function", algorithm.advantage_function)
    if algorithm.loss_function is not None:
        from prefixrl.learner.training import loss_function

        loss_function.load(algorithm.loss_function)


def _adopt(directory: Path, part: ReplayPart, config: RunConfig) -> None:
    """Make the settings of a part those of the directory; a part that begins again changes nothing."""
    path = directory / CHANGES_FILE
    written = {(line.iteration, line.key) for line in json_lines.read(path, ChangeLine)}
    lines = [line for line in part.changes if (line.iteration, line.key) not in written]
    if lines:
        json_lines.append(path, lines)
    write_atomically(directory / CONFIG_FILE, config.model_dump_json(indent=2))


def _train(
    plan: ReplayPlan,
    part: ReplayPart,
    config: RunConfig,
    rank_and_count: tuple[int, int],
    stop: StopSignal,
) -> None:
    # Late: torch is imported once there is something to train.
    with without_gc():
        import torch

        from prefixrl.learner.commands.journal_client import JournalClient
        from prefixrl.learner.commands.replay_loop import Replay
        from prefixrl.learner.models import distributed
        from prefixrl.learner.models.model import Models
        from prefixrl.learner.run.collapse_answers import CollapseAnswers
        from prefixrl.learner.run.metrics import MetricsLog

    directory = Path(config.directory)
    models = Models.load(config, *rank_and_count, model_folder(config.adapter.start))
    is_resumed, iteration = load_checkpoint(config, models)
    metrics = collapse = None
    if models.rank == 0:
        note_start(directory, iteration)
        metrics = MetricsLog(directory, iteration, stop, is_replay=True)
        collapse = collapse_of(config, metrics)

    def are_stopping() -> bool:
        requested = torch.tensor([float(stop.is_requested())], device=models.device)
        return bool(distributed.sum_over_ranks(requested).item())

    client = JournalClient(plan, config, plan.end_of(part), are_stopping)
    loop = Replay(
        config,
        directory,
        client,
        models,
        None,
        plan.problems,
        stop,
        (),
        CollapseAnswers(config, directory, models, collapse, stop, plan.returns),
        iteration,
        plan=plan,
        metrics=metrics,
    )
    loop.saved = iteration if is_resumed else -1
    try:
        loop.run()
    finally:
        client.close()
        distributed.stop()


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--nproc-per-node", type=click.IntRange(1), default=1)
def main(directory: Path, nproc_per_node: int) -> None:
    """Carry out the next part of the plan in DIRECTORY."""
    with exit_codes():
        info, missing = ranks.rank_info(os.environ)
        start_logging("prefixrl-learner" if info.ranks == 1 else f"prefixrl-learner-{info.rank}")
        stop = stop_event()
        if nproc_per_node > 1 and info.ranks == 1:
            module = "prefixrl.learner.commands.replay"
            ranks.supervise([str(directory)], nproc_per_node, stop.is_set, module)
            return
        os.environ.update(missing)
        with no_teardown():
            replay(directory, info.rank, info.ranks, stop.is_set)


def program() -> None:
    """Run the command as a process of its own, which ends without what torch's parts say when they are taken apart."""
    with no_teardown():
        main()


if __name__ == "__main__":
    program()
