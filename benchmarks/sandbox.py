"""The cost of running a model's program in the sandbox, how late hostile ones end, what is left of many programs.

python -m benchmarks.sandbox [--quick] --json benchmarks/results/sandbox.json
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.hostile_programs import HOSTILE, TIMEOUT_S, judged
from benchmarks.ordinary_user import run_as_ordinary_user
from benchmarks.results import Figure, Report, commit, options
from prefixrl.scorer.sandbox.runner import PYTHON, ProgramLimits, probe, run

PROGRAMS = 10_000
QUICK_PROGRAMS = 200
PAIRS = 100
SOURCE = "print(sum(range(100)))"


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def bare() -> None:
    """The same program by the same Python, without the sandbox."""
    subprocess.run([PYTHON, "-I", "-S", "-c", SOURCE], capture_output=True, check=True)


def figure(name: str, values: list[float], baseline: list[float]) -> Figure:
    middle, against = statistics.median(values), statistics.median(baseline)
    low, *_, high = statistics.quantiles(values, n=20)
    return Figure(
        name,
        "ms",
        middle,
        len(values),
        (low, high),
        against,
        "the same program without the sandbox",
        middle / against,
        "median",
        "5th and 95th percentile",
    )


def hostile() -> list[Figure]:
    """Seconds to the verdict on every hostile program, by this user and, where this is root, by an ordinary one."""
    figures = [latest("hostile", list(judged(list(HOSTILE))))]
    if os.geteuid() == 0:
        shown = run_as_ordinary_user(
            "from benchmarks import hostile_programs; hostile_programs.main()"
        )
        if shown is None:
            click.echo(
                "not measured by an ordinary user: it can run no Python here that has the packages"
            )
        else:
            figures.append(
                latest(
                    "hostile_by_ordinary_user",
                    [json.loads(each) for each in shown.splitlines()[:-1]],
                )
            )
    return figures


def latest(name: str, found: list[dict[str, object]]) -> Figure:
    """The slowest verdict; each program must have one that is neither an error nor right."""
    if len(found) != len(HOSTILE):
        raise click.ClickException(
            f"{name}: {len(found)} verdicts on {len(HOSTILE)} hostile programs"
        )
    if strange := [
        each for each in found if each["outcome"] not in ("wrong", "parse_fail", "timeout")
    ]:
        raise click.ClickException(f"{name}: programs without a verdict, or right: {strange}")
    seconds_each = [float(str(each["took_s"])) for each in found]
    low, *_, high = statistics.quantiles(seconds_each, n=20)
    slowest, limit_s = max(seconds_each), float(TIMEOUT_S)
    limit, kind = "the limit of one program", "5th and 95th percentile"
    return Figure(
        name,
        "s",
        slowest,
        len(found),
        (low, high),
        limit_s,
        limit,
        slowest / limit_s,
        "maximum",
        kind,
    )


def leaks(programs: int) -> dict[str, int]:
    """Processes and descriptors after so many programs, less those before."""
    processes, descriptors, everyone = children(), open_files(), zombies()
    for number in range(programs):
        finished = run(f"print({number})", limits=ProgramLimits(wall_ms=60_000, cpu_s=60))
        assert finished.stdout == b"%d\n" % number, finished
    return {
        "programs": programs,
        "processes": children() - processes,
        "descriptors": open_files() - descriptors,
        "orphans": zombies() - everyone,
    }


def children() -> int:
    """Children of this process, those included that it has not reaped."""
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def zombies() -> int:
    """Dead Python processes of the whole machine that nobody has reaped."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        found += rest.split()[0] == "Z" and name.startswith("python")
    return found


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Start overhead against a bare Python, and leaks over many programs."""
    reason = probe()
    if reason:
        raise click.ClickException(reason)
    began_s = time.monotonic()
    measured = commit()
    pairs = PAIRS // 5 if quick else PAIRS
    sandboxed, plain = [], []
    for _ in range(pairs):  # in turns, so that other work of the machine meets both
        plain.append(1000 * seconds(bare))
        sandboxed.append(1000 * seconds(lambda: run(SOURCE)))
    overhead = [a - b for a, b in zip(sandboxed, plain, strict=True)]
    figures = [figure("start_to_end", sandboxed, plain), figure("overhead", overhead, plain)]
    figures += hostile()
    left = leaks(QUICK_PROGRAMS if quick else PROGRAMS)
    report = Report(
        "sandbox", quick, {"source": SOURCE, "cores": os.cpu_count()}, figures, left, measured
    )
    report.wall_s = time.monotonic() - began_s
    report.write(path)
    for each in figures:
        click.echo(
            f"{each.name}: {each.value:.2f} {each.unit} ({each.baseline:.2f}: {each.baseline_name})"
        )
    click.echo(f"left: {left}")
    if left["processes"] or left["descriptors"]:
        raise click.ClickException(f"something was left behind: {left}")


if __name__ == "__main__":
    main()
