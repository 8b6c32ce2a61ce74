"""The command `prefixrl-learner`: trains the adapter, owns the run, reads the run file."""

import os
from pathlib import Path

import click

from prefixrl.common.process import exit_codes, start_logging, stop_event
from prefixrl.common.worker.command import settings_option


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@settings_option
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, help="Learner ranks to start on this machine.")
@click.option(
    "--check",
    is_flag=True,
    help="Print the resolved config and what follows from it, then stop; executes nothing that RUN_FILE names.",
)
def main(run_file: Path, settings: tuple[str, ...], nproc_per_node: int, check: bool) -> None:
    """Train the run described by RUN_FILE; resume from its directory if it has begun.

    Executes the Python files that RUN_FILE names (reward.function, algorithm.advantage_function).
    """
    with exit_codes():
        from prefixrl.common.config.load import import_functions, load

        config = load(run_file, settings)
        if check:
            from prefixrl.learner.run.budget import check_fit
            from prefixrl.learner.run.forecast import forecast

            if nproc_per_node > 1:
                launch = config.launch.model_copy(update={"learner_ranks": nproc_per_node})
                config = config.model_copy(update={"launch": launch})
            click.echo(config.model_dump_json(indent=2))
            said = forecast(config)
            click.echo(said.text)
            check_fit(config, said.prompt_tokens)
            return
        import_functions(config)
        from prefixrl.learner import ranks

        info, missing = ranks.rank_info(os.environ)
        start_logging("prefixrl-learner" if info.ranks == 1 else f"prefixrl-learner-{info.rank}")
        stop = stop_event()
        if nproc_per_node > 1 and info.ranks == 1:
            flags = [flag for setting in settings for flag in ("--set", setting)]
            ranks.supervise([str(run_file), *flags], nproc_per_node, stop.is_set)
            return
        os.environ.update(missing)
        from prefixrl.learner.start import start

        start(config, info.rank, info.ranks, stop.is_set)


if __name__ == "__main__":
    main()
