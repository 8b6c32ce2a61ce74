"""`prefixrl logs`: the logs of a run's processes, by name or role."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.process import stop_event
from prefixrl.common.run.json_lines import AddedLines
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.view.run_state import log_tail

POLL_S = 0.2


@click.command()
@run_directory_argument
@click.argument("name", required=False)
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Lines per log.",
)
@click.option(
    "--follow", "-f", "follows", is_flag=True, help="Go on with the lines that come, until Ctrl-C."
)
def logs(run_directory: Path, name: str | None, count: int, follows: bool) -> None:
    """Print the newest lines of the logs of a run.

    NAME is a process (scorer-1) or a role (learner, rollout, scorer). The learner's log holds those of broker and
    weight server too.
    """
    paths = logs_of(run_directory, name)
    for line in (
        follow(paths, count, stop_event().is_set) if follows else newest_lines(paths, count)
    ):
        click.echo(printable(line))


def logs_of(directory: Path, name: str | None) -> list[Path]:
    """Return the logs of a process or role, all without a name; raises ConfigError."""
    paths = sorted((directory / "logs").glob("*.log"))
    if not paths:
        raise ConfigError(
            f"{directory} holds no log: only `prefixrl launch` and `prefixrl slurm` write them there. systemd keeps "
            "those of services (journalctl); a process started by hand logs to its terminal"
        )
    if name is None:
        return paths
    role = name.removesuffix("s")
    chosen = [path for path in paths if path.stem == name or path.stem.partition("-")[0] == role]
    if not chosen:
        raise ConfigError(
            f"{directory} has no log of {name!r}; it has {', '.join(path.stem for path in paths)}"
        )
    return chosen


def newest_lines(paths: list[Path], count: int) -> Iterator[str]:
    """Yield the newest lines of each log, under its name where there are several."""
    for path in paths:
        if len(paths) > 1:
            yield f"== {path}"
        yield from log_tail(path, count)


def follow(paths: list[Path], count: int, stopped: Callable[[], bool]) -> Iterator[str]:
    """Yield the newest lines, then those that come; of several logs each with its name."""
    mark = "{stem}: {line}" if len(paths) > 1 else "{line}"
    added = [AddedLines(path, path.stat().st_size) for path in paths]
    for path in paths:
        yield from (mark.format(stem=path.stem, line=line) for line in log_tail(path, count))
    while not stopped():
        for new in added:
            for block in new.blocks():
                for line in block.decode(errors="replace").splitlines():
                    yield mark.format(stem=new.path.stem, line=line)
        time.sleep(POLL_S)
