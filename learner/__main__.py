"""The command `prefixrl-learner`: trains the adapter, owns the run, reads the run file."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prefixrl.common.host.exit_codes import exit_codes, printable
from prefixrl.common.host.process import no_teardown, start_logging, stop_event, without_gc
from prefixrl.common.worker.command import PATH, set_flags, settings_option

if TYPE_CHECKING:
    from prefixrl.common.config.run import RunConfig

log = logging.getLogger(__name__)


@click.command()
@click.argument("run_file", type=PATH)
@settings_option
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    default=1,
    help="Learner ranks to start on this machine.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Print the resolved config and what follows from it, then stop; of the files that RUN_FILE names it executes "
    "that of reward.function alone, on a few answers.",
)
def main(run_file: Path, settings: tuple[str, ...], nproc_per_node: int, check: bool) -> None:
    """Train the run described by RUN_FILE; resume from its directory if it has begun.

    Executes the Python files that RUN_FILE names (reward.function, algorithm.advantage_function and loss_function).
    """
    with exit_codes():
        from prefixrl.common.config.load import import_functions, load

        config = load(run_file, settings)
        if check:
            _print_check(config, nproc_per_node)
            return
        import_functions(config)
        if config.algorithm.loss_function is not None:
            from prefixrl.learner.training import loss_function

            loss_function.load(config.algorithm.loss_function)
        from prefixrl.learner.processes import ranks

        info, missing = ranks.rank_info(os.environ)
        start_logging("prefixrl-learner" if info.ranks == 1 else f"prefixrl-learner-{info.rank}")
        stop = stop_event()
        if nproc_per_node > 1 and info.ranks == 1:
            flags = set_flags(settings)
            ranks.supervise([str(run_file), *flags], nproc_per_node, stop.is_set)
            return
        os.environ.update(missing)
        if (
            "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        ):  # of other lengths in every iteration, blocks would be lost
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        from prefixrl.learner.start import start

        with no_teardown():
            start(_placed(config), info.rank, info.ranks, stop.is_set)


def _print_check(config: "RunConfig", ranks: int) -> None:
    """Print the config and what follows from it; raises UserError for what cannot be."""
    from prefixrl.common.host.placement import gpus_here, place, processes_of
    from prefixrl.learner.check.budget import check_fit
    from prefixrl.learner.check.loadable import check_weights
    from prefixrl.learner.check.plugged_in import loaded_plugins
    from prefixrl.learner.check.report import forecast
    from prefixrl.learner.check.shares import with_shares
    from prefixrl.learner.run.tracking import check_packages

    if ranks > 1:
        launch = config.launch.model_copy(update={"learner_ranks": ranks})
        config = config.model_copy(update={"launch": launch})
    click.echo(config.model_dump_json(indent=2, exclude_defaults=True))
    with without_gc():  # transformers is a large package
        said = forecast(config)
        # Before the weights: it plans the memory of models whose config alone is here.
        click.echo(said.text)
        check_weights(config)
    check_fit(config, said.prompt_tokens)
    if config.reward.function is not None:
        from prefixrl.learner.check.reward_trial import check_line
        from prefixrl.learner.data.rows import prompts

        click.echo(printable(check_line(config, prompts(said.training))))
    for line in loaded_plugins():
        click.echo(f"plug-in, {line}")
    check_packages(config.log)
    placed = place(processes_of(config), len(gpus_here()))
    click.echo("\n".join(with_shares(config, placed, said.prompt_tokens)[1]), nl=bool(placed))


def _placed(config: "RunConfig") -> "RunConfig":
    """Return the run file with shares for engines that are not alone on their GPUs."""
    from prefixrl.common.host.placement import VARIABLE, neighbours, read

    placed = read(os.environ.get(VARIABLE, ""))
    is_crowded = any(len(names) > 1 for names in neighbours(placed).values())
    if not is_crowded and (config.scorer.prm is None or config.scorer.prm.device == "cpu"):
        return config
    from prefixrl.learner.check.budget import device_bytes
    from prefixrl.learner.check.report import forecast
    from prefixrl.learner.check.shares import with_shares

    if is_crowded or device_bytes(config) is not None:
        config, lines = with_shares(config, placed, forecast(config).prompt_tokens)
        log.info("%s", "; ".join(lines))
    return config


def program() -> None:
    """Run the command as a process of its own, which ends without what torch's parts say when they are taken apart."""
    with no_teardown():
        main()


if __name__ == "__main__":
    program()
