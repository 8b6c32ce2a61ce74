"""The process behind `prefixrl eval` and `generate`, started beside its workers: carries out `plan.json`.

    plan.json ──▶ broker that issues no training ──▶ rollouts, scorers ──▶ results.json, or answers.jsonl

Rollouts load the checkpoint as version 0; the digest of their weights must be one under which the run published it.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
import msgspec

from prefixrl.common.config.data import TRAIN_FILE
from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.learner import LogConfig
from prefixrl.common.config.load import from_json, import_functions
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.plans import ANSWERS_FILE, PLAN_FILE, RESULTS_FILE, OfflinePlan
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.process import start_logging, write_atomically
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.commands.eval_command import CheckpointEvaluation
from prefixrl.learner.commands.generate_command import AnswerGeneration, given_rows
from prefixrl.learner.data import problems
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.run.directory import RunDirectory
from prefixrl.learner.run.stop import StopSignal


def read_plan(directory: Path) -> tuple[OfflinePlan, RunConfig]:
    """Return the plan in a directory and its config, whose functions are imported."""
    plan = read_json(directory / PLAN_FILE, OfflinePlan)
    config = from_json(plan.config, f"the plan in {directory}")
    import_functions(config)
    # The run that is judged may go on, on the same host: its ports are taken.
    return plan, config.model_copy(update={"log": LogConfig()})


def judge(plan: OfflinePlan, config: RunConfig) -> None:
    """Judge the arms of a plan; judged rows stay in files, so an interrupted evaluation goes on."""
    owned = RunDirectory(config, has_plan=True)
    problems.keep_missing(config)
    with serving(config) as (client, stop):
        results = CheckpointEvaluation(plan, config, client, stop).run()
        document = msgspec.json.format(msgspec.json.encode(results))
        write_atomically(owned.path / RESULTS_FILE, document)


def answer(plan: OfflinePlan, config: RunConfig) -> None:
    """Answer all given rows; a process that answers is not started again in the middle."""
    rows = given_rows(config)
    owned = RunDirectory(config, has_plan=True)
    # For a broker that serves evaluations only.
    (owned.path / TRAIN_FILE).parent.mkdir(exist_ok=True)
    (owned.path / TRAIN_FILE).write_bytes(b"")
    with (owned.path / ANSWERS_FILE).open("xb") as out:
        generation = AnswerGeneration(plan, config, rows, out)
        if any(row.problem for row in rows):
            with serving(config) as (client, stop):
                generation.run(client, stop)
        else:
            generation.write_unasked()


@contextmanager
def serving(config: RunConfig) -> Iterator[tuple[BrokerClient, StopSignal]]:
    """Run a broker that trains nothing; yield a client and what ends its waits; stop the workers after it."""
    with (
        closing(Servers(config, Path(config.directory), 0, trains=False)) as servers,
        # An operator that halts the broker does not end the wait: its client learns of it, the caller does not.
        closing(BrokerClient(servers.address, StopSignal(servers=servers))) as client,
    ):
        yield client, StopSignal(servers=servers)
        servers.expect_end()
        client.stop("everything is judged")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def main(directory: Path) -> None:
    """Carry out the plan in DIRECTORY."""
    start_logging("prefixrl-offline")
    with exit_codes():
        plan, config = read_plan(directory)
        (judge if plan.arms else answer)(plan, config)


if __name__ == "__main__":
    main()
