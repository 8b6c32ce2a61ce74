"""All benchmarks one after the other, and the page of their figures.

    python -m benchmarks                    runs all of them at full size, hours; figures go to benchmarks/results
    python -m benchmarks --quick            the small form of each, to runs/benchmarks
    python -m benchmarks --only padding     some of them
    python -m benchmarks --page             runs none, writes benchmarks/RESULTS.md from benchmarks/results

Each runs as a process of its own, alone, so that none disturbs another. One that fails is named, the others go on; one
that this machine lacks something for is left out, which is no failure: it says what is missing."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.page import RESULTS, names, page
from benchmarks.results import ROOT, LeftOut

FULL_S, QUICK_S = 6 * 3600.0, 180.0
"""Longest time for one benchmark."""
NOT_QUICK = (
    *(
        "kills",
        "soak",
        "endurance",
        "fast_motion",
        "process_rewards",
        "baselines",
        "second_task",
        "letters_example",
    ),
    *(
        "advice",
        "own_tasks",
        "trl_peer",
        "broker_peers",
        "blocking_server",
        "evaluation_cost",
        "scale_model",
        "serving",
    ),
)
"""Their small forms take longer than a minute: they train, wait as long as a run does, or install their peers."""


class Outcome(NamedTuple):
    """The end of one benchmark."""

    words: str
    is_failure: bool = False


def run(name: str, is_quick: bool, folder: Path) -> Outcome:
    """Run one benchmark; its output goes to a log beside its figures."""
    log, limit_s = folder / f"{name}.log", QUICK_S if is_quick else FULL_S
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if is_quick else [])]
    command += ["--json", str(folder / f"{name}.json")]
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(f"not ended within {limit_s:g} s; see {log}", is_failure=True)
    if code == LeftOut.exit_code:
        return Outcome(
            f"left out: {log.read_text(errors='replace').strip().rpartition('Error: ')[2]}"
        )
    return Outcome(f"exit code {code}; see {log}", is_failure=True) if code else Outcome("done")


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="The small forms; figures go to runs/benchmarks and are not committed.",
)
@click.option("--only", multiple=True, metavar="NAME", help="This benchmark; may be repeated.")
@click.option(
    "--page", "is_page_only", is_flag=True, help="Write the page of the figures that are there."
)
def main(quick: bool, only: tuple[str, ...], is_page_only: bool) -> None:
    """Run benchmarks and write the page of their figures."""
    if unknown := set(only) - set(names()):
        raise click.UsageError(
            f"there is no benchmark {sorted(unknown)}; there are {', '.join(names())}"
        )
    folder = ROOT / "runs/benchmarks" if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in (
        ()
        if is_page_only
        else only or [each for each in names() if not (quick and each in NOT_QUICK)]
    ):
        started_s = time.monotonic()
        outcome = run(name, quick, folder)
        click.echo(f"{name}: {outcome.words}, {time.monotonic() - started_s:.0f} s")
        failed += [name] if outcome.is_failure else []
    target = folder / "RESULTS.md" if quick else ROOT / "benchmarks/RESULTS.md"
    target.write_text(page(folder), encoding="utf-8")
    click.echo(f"figures: {target}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
