"""Processes of a training run hold no more after hours: memory, descriptors, threads, files.

The arithmetic example by `prefixrl launch`, real models and engines, with evaluations and checkpoints in mid-run. A
reward function that waits paces it, so that it takes little of the machine. Every look reads /proc of each process of
the run, its folder, its temporary folder and /dev/shm of the machine. SIGTERM ends it; it must have saved.

A value is flat if the median of the last quarter of the looks is no further above that of the first than
3 % or 4 MiB (memory: its share, PSS), two descriptors, two threads; likewise files in the temporary folder (two) and
/dev/shm (4 MiB). Logs may grow by 1 MiB per hour. The first twelfth of the time is warming up and counts for nothing.
Journal and metrics grow with the run: they are told, not judged.

    python -m benchmarks.endurance [--quick] [--seconds 7200] --json FILE     looks go to FILE.looks.jsonl as they come
"""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from benchmarks.kills import RUN_FILE, processes
from benchmarks.results import Figure, Report, commit, options
from prefixrl.common.run.disk import held_bytes

WARM_UP_SHARE = 1 / 12
SHARED_MEMORY = Path("/dev/shm")
STOPPED = 130
"""The exit code of a launch that was stopped."""
SAVES_WITHIN_S = 300.0
REWARD = """import time

def score(question, text, gold):
    time.sleep({pause_s})
    return float(f"boxed{{{{{{gold}}}}}}" in text)
"""
SETTINGS = (
    "algorithm.iterations=1000000",
    "algorithm.groups_per_iteration=4",
    "algorithm.samples_per_prompt=4",
    "checkpoint.every=50",
    "checkpoint.keep=2",
    "evaluation.every=200",
    "evaluation.problems=16",
    "evaluation.selection_problems=16",
    "evaluation.sampled_candidates=1",
)
TOLERANCES = {
    "memory": 4.0,
    "descriptors": 2.0,
    "threads": 2.0,
    "temporary files": 2.0,
    "/dev/shm": 4.0,
}
MEMORY_SHARE = 0.03
LOGS_MIB_PER_HOUR = 1.0
UNITS = {"memory": "MiB", "logs": "MiB", "journal": "MiB", "whole run": "MiB", "/dev/shm": "MiB"}


class Look(msgspec.Struct):
    """One look at a run."""

    time_s: float
    """Counted from the start."""
    values: dict[str, float]
    """By name, as `memory of scorer-0`; processes of one title are numbered by age."""


def look_at(pid: int, directory: Path, temporary: Path, time_s: float) -> Look:
    """Read what the processes below a launch hold, and how large its files are."""
    values: dict[str, float] = {}
    found = processes(pid)
    for title, pids in found.items():
        for number, each in enumerate(sorted(set(pids))):
            with contextlib.suppress(OSError, StopIteration):  # it ended meanwhile
                values |= {f"{what} of {title}-{number}": value for what, value in held_by(each)}
    values["processes"] = float(sum(map(len, found.values())))
    used = shutil.disk_usage(SHARED_MEMORY).used if SHARED_MEMORY.is_dir() else 0
    values |= {
        "/dev/shm": used / 2**20,
        "temporary files": float(
            sum(len(names) + len(files) for _, names, files in os.walk(temporary))
        ),
        "logs": held_bytes(directory / "logs") / 2**20,
        "journal": held_bytes(directory / "journal") / 2**20,
        "whole run": held_bytes(directory) / 2**20,
    }
    return Look(time_s, values)


def held_by(pid: int) -> Iterator[tuple[str, float]]:
    """Memory in MiB (its share of what is shared), descriptors and threads of a process."""
    folder = Path(f"/proc/{pid}")
    lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()
    yield "memory", int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    yield "descriptors", float(len(os.listdir(folder / "fd")))
    yield "threads", float(len(os.listdir(folder / "task")))


def run(
    folder: Path, seconds: float, every_s: float, pause_s: float, looks_file: Path
) -> tuple[list[Look], int]:
    """Run for so long; return the looks, and the iterations that were trained."""
    directory, temporary = folder / "run", folder / "temporary"
    temporary.mkdir()
    (folder / "paced.py").write_text(REWARD.format(pause_s=pause_s), encoding="utf-8")
    settings = (f"directory={directory}", f"reward.function={folder}/paced.py:score", *SETTINGS)
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE)]
    command += [flag for setting in settings for flag in ("--set", setting)]
    looks: list[Look] = []
    with (folder / "console.log").open("wb") as console, looks_file.open("wb") as kept:
        environment = os.environ | {"TMPDIR": str(temporary)}
        launch = subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, env=environment
        )
        began_s = time.monotonic()
        try:
            while (passed_s := time.monotonic() - began_s) < seconds and launch.poll() is None:
                time.sleep(min(every_s, seconds - passed_s))
                looks.append(look_at(launch.pid, directory, temporary, time.monotonic() - began_s))
                kept.write(msgspec.json.encode(looks[-1]) + b"\n")
                kept.flush()
        finally:
            launch.send_signal(signal.SIGTERM)
            code = launch.wait(SAVES_WITHIN_S)
    assert code == STOPPED, f"exit code {code}: {(folder / 'console.log').read_text()[-3000:]}"
    metrics = directory / "metrics.jsonl"
    return looks, len(metrics.read_bytes().splitlines())


def judged(looks: list[Look]) -> tuple[list[Figure], list[str], dict[str, float]]:
    """Return figures (last quarter against first), what is not flat, and the slope of each per hour."""
    warm = looks[int(len(looks) * WARM_UP_SHARE) :]
    figures, grown, slopes = [], [], {}
    for name in sorted({name for each in warm for name in each.values}):
        points = [(each.time_s / 3600, each.values[name]) for each in warm if name in each.values]
        if len(points) < max(4, len(warm) // 2):
            continue  # a process of a moment
        values = [value for _, value in points]
        quarter = len(values) // 4
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        slopes[name] = statistics.linear_regression(*zip(*points, strict=True)).slope
        kind = name.partition(" of ")[0]
        most = TOLERANCES.get(kind, float("inf"))
        if kind == "memory":
            most = max(most, MEMORY_SHARE * first)
        if last - first > most or (kind == "logs" and slopes[name] > LOGS_MIB_PER_HOUR):
            grown.append(f"{name}: {first:.4g} -> {last:.4g}, {slopes[name]:+.3g} per hour")
        spread, ratio = (min(values), max(values)), last / first if first else None
        text = "median of the last quarter", "smallest and largest"
        baseline = (first, "median of the first quarter", ratio)
        figures.append(
            Figure(name, UNITS.get(kind, "1"), last, len(values), spread, *baseline, *text)
        )
    return figures, grown, slopes


@click.command()
@options
@click.option(
    "--seconds", type=click.IntRange(min=60), help="How long.  [default: 7200; --quick: 90]"
)
@click.option("--every-s", type=float, help="Seconds between two looks.  [default: 30; --quick: 3]")
@click.option(
    "--pause-s",
    default=0.25,
    show_default=True,
    help="What the reward function waits for each text.",
)
def main(
    path: Path, quick: bool, seconds: int | None, every_s: float | None, pause_s: float
) -> None:
    """Run, look, judge, and write the figures; exit code 1 where something grew."""
    measured, started_s = commit(), time.monotonic()
    length_s, between_s = (
        float(seconds or (90 if quick else 7200)),
        every_s or (3.0 if quick else 30.0),
    )
    with tempfile.TemporaryDirectory(prefix="endurance-") as name:
        looks, iterations = run(
            Path(name), length_s, between_s, pause_s, path.with_suffix(".looks.jsonl")
        )
    figures, grown, slopes = judged(looks)
    settings = {"seconds": length_s, "every_s": between_s, "pause_s": pause_s, "settings": SETTINGS}
    details = {"iterations": iterations, "not_flat": grown, "slopes_per_hour": slopes}
    Report("endurance", quick, settings, figures, details, measured).finish(path, started_s)
    print(f"{iterations} iterations; not flat: {'; '.join(grown) or 'nothing'}")
    if grown and not quick:  # a minute is warming up
        raise SystemExit(1)


if __name__ == "__main__":
    main()
