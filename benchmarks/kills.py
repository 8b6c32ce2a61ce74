"""A real training run whose processes are killed ends with the parameters of the run that was left alone, bit by bit.

The arithmetic example's models, transformers engines, DeepSpeed, S = 0; problems are asked by their outcomes;
checkpoints at geometric steps, the best one kept, every one uploaded. First an undisturbed run; then runs in which
every named crash point kills its process once (`common/journal/crash_points.py`), and runs in which processes of all
roles get SIGKILL at random times. A launch that gives up or is killed is started again, as its user would. Compared
are the files of the last checkpoint: weights and moments of actor and critic. At S = 2, where the order of arrival
decides, every group must be trained once (`prefixrl inspect --check`).

    python -m benchmarks.kills --json benchmarks/results/kills.json
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click
import xxhash

from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, POINTS, VARIABLE
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.deploy.runs.inspect import checked
from prefixrl.learner.run.retention import BEST, milestones
from prefixrl.learner.training.checkpoint import damage

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"
ITERATIONS, KILLS, KILLS_PER_RUN, POINTS_PER_RUN, GAP_S = 10, 40, 8, 4, 5.0
MOST_S, MOST_STARTS = 900.0, 40
SETTINGS = (
    "bitwise=true",
    "data.sampling=by_outcome",
    f"algorithm.iterations={ITERATIONS}",
    "algorithm.groups_per_iteration=8",
    "checkpoint.every=3",
    "checkpoint.keep=1",
    "checkpoint.growth=2",
    "checkpoint.keep_best=1",
    "checkpoint.upload=['ls']",
    "evaluation.every=2",
    "evaluation.problems=8",
    "evaluation.selection_problems=8",
    "evaluation.sampled_candidates=1",
    "broker.silence_s=2",
    "broker.heartbeat_s=0.5",
    "broker.attempts=100",
    "broker.requeues=100",
    "broker.journal_segment_mib=0.05",
    "launch.scorers=2",
)
RARE = ("checkpoint.removing",)
"""Points that a process that was started late passes once."""
ROLES = ("learner", "broker", "weights", "rollout", "scorer", "launch")


@dataclass
class Outcome:
    """One disturbed run."""

    what: str
    digest: str = ""
    history: str = ""
    starts: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    """SIGKILLs by role, or crash points that were reached."""


def command(directory: Path, staleness: int) -> list[str]:
    """Return the launch of a run."""
    settings = (f"directory={directory}", f"algorithm.max_staleness={staleness}", *SETTINGS)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    return [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), *flags]


def processes(pid: int) -> dict[str, list[int]]:
    """Return the processes below a launch by role, itself among them."""
    found: dict[str, list[int]] = {"launch": [pid]}
    waiting = [pid]
    while waiting:
        try:
            threads = list(Path(f"/proc/{waiting[0]}/task").iterdir())
            children = " ".join(
                (thread / "children").read_text(encoding="ascii") for thread in threads
            )
            for child in map(int, children.split()):
                title = Path(f"/proc/{child}/cmdline").read_bytes().partition(b"\0")[0].decode()
                found.setdefault(title.removeprefix("prefixrl-"), []).append(child)
                waiting.append(child)
        except OSError:
            pass  # it ended meanwhile
        waiting.pop(0)
    return found


def disturbed(
    directory: Path, staleness: int, what: str, points: str = "", kills: int = 0, seed: int = 0
) -> Outcome:
    """Run to the end through crash points, or kills at random times."""
    outcome, random_ = Outcome(what), random.Random(seed)
    crashed = directory.with_name(f"{directory.name}-crashed")
    crashed.mkdir()
    environment = {**os.environ, VARIABLE: points, FOLDER_VARIABLE: str(crashed)}
    began_s = next_s = time.monotonic()
    process, log = None, directory.with_name(f"{directory.name}.log").open("wb")
    while not (directory / "summary.json").exists() or (process and process.poll() is None):
        assert time.monotonic() - began_s < MOST_S, (
            f"{what}: not finished after {MOST_S:g} s, {outcome.kills}"
        )
        if process is None or process.poll() is not None:
            assert outcome.starts < MOST_STARTS, f"{what}: {MOST_STARTS} starts were not enough"
            outcome.starts += 1
            process = subprocess.Popen(
                command(directory, staleness), stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        if sum(outcome.kills.values()) < kills and time.monotonic() > next_s:
            next_s = time.monotonic() + random_.expovariate(1.0 / GAP_S)
            role = random_.choice(ROLES)
            if victims := processes(process.pid).get(role):
                os.kill(random_.choice(victims), signal.SIGKILL)
                outcome.kills[role] += 1
        time.sleep(0.05)
    log.close()
    if points:
        outcome.kills.update(path.name for path in crashed.iterdir())
    outcome.digest, outcome.history = digest_of(directory), checked(directory)
    check_checkpoints(directory / "checkpoints")
    print(
        f"{what}: {dict(outcome.kills)}, {outcome.starts} starts, {outcome.digest}; {outcome.history}",
        flush=True,
    )
    return outcome


def digest_of(directory: Path) -> str:
    """Return the digest of weights and moments after the last iteration."""
    share = directory / f"checkpoints/step_{ITERATIONS:08d}/rank_00000"
    found = xxhash.xxh3_128()
    for name in ("actor", "critic"):
        found.update((share / f"{name}.safetensors").read_bytes())
    return found.hexdigest()


def check_checkpoints(folder: Path) -> None:
    """Assert that the newest, geometric and best checkpoints are there, whole, and no others."""
    there = checkpoints(folder)
    assert not any(map(damage, there.values())), f"damaged checkpoints in {folder}"
    best = int((folder / BEST).resolve().name[5:])
    assert set(there) == {*milestones(ITERATIONS, 2), ITERATIONS, best}, (
        f"{sorted(there)}, the best is {best}"
    )


def point_sets(quick: bool) -> list[str]:
    """Return the crash points, a few per run, each at its second or third passage, rare ones earlier."""
    wanted = (
        ["checkpoint.written", "checkpoint.removing", "upload.begun", "scores.judged"]
        if quick
        else list(POINTS)
    )
    sets = [
        wanted[start :: -(-len(wanted) // POINTS_PER_RUN)]
        for start in range(-(-len(wanted) // POINTS_PER_RUN))
    ]
    return [
        ",".join(
            f"{name}:{1 if name in RARE else 2 + number % 2}" for number, name in enumerate(each)
        )
        for each in sets
    ]


@click.command()
@options
@click.option("--seed", default=1, show_default=True)
def main(path: Path, quick: bool, seed: int) -> None:
    """Compare disturbed runs with the one that was left alone."""
    started_s, measured, kills = time.monotonic(), commit(), 2 if quick else KILLS
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        alone = disturbed(folder / "alone", 0, "left alone")
        outcomes = [
            disturbed(folder / f"points-{number}", 0, f"crash points {points}", points)
            for number, points in enumerate(point_sets(quick))
        ]
        # A run may end before its last kill.
        while (left := kills - sum(each.kills[role] for each in outcomes for role in ROLES)) > 0:
            most, number = min(KILLS_PER_RUN, left), len(outcomes)
            where = folder / f"kills-{number}"
            outcomes.append(
                disturbed(where, 0, f"{most} kills at S = 0", kills=most, seed=seed + number)
            )
        late = (
            []
            if quick
            else [disturbed(folder / "late", 2, "kills at S = 2", kills=KILLS_PER_RUN, seed=seed)]
        )
    equal = [each for each in outcomes if each.digest == alone.digest]
    reached = {name for each in outcomes for name in each.kills if name in POINTS}
    values = {
        "disturbed runs at S = 0": len(outcomes),
        "of them bitwise equal to the one left alone": len(equal),
        "crash points reached": len(reached),
        "SIGKILLs at random times": sum(
            count for each in outcomes for role, count in each.kills.items() if role in ROLES
        ),
        "starts of prefixrl launch": sum(each.starts for each in outcomes),
    }
    figures = [Figure(name, "1", value, 1, (value, value)) for name, value in values.items()]
    details = [
        {
            "what": each.what,
            "kills": dict(each.kills),
            "starts": each.starts,
            "history": each.history,
        }
        | {"is_equal": each.digest == alone.digest}
        for each in (alone, *outcomes, *late)
    ]
    settings = {
        "seed": seed,
        "iterations": ITERATIONS,
        "missing_points": sorted(set(POINTS) - reached),
    }
    Report("kills", quick, settings, figures, details, measured).finish(path, started_s)
    assert len(equal) == len(outcomes), json.dumps(details, indent=1)


if __name__ == "__main__":
    main()
