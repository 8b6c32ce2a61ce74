"""Seats of a scorer's engine that decode, and the share that the run reports, beside the release before.

A real broker, a simulated rollout and a scorer with work that never runs out; rows of lognormal length (mean 550
tokens, one in twenty cut at 2,048), 8 per group. Each round runs four arms, each from its own export of a commit:

    simulated   256 seats, 4 ms per token, tasks of 4 groups where the release takes whole tasks
    vllm        vLLM on this CPU, max_num_seqs = 16, tasks of one group, rows a quarter as long

by the release before (`BEFORE`: credit in tasks, each held until its longest row ends) and by the commit that is
checked out. The share of seats is that of rows decoding by the clock: of the simulated engine's rows, looked at 50
times a second, and of vLLM's own count of running requests.

    python -m benchmarks.seats [--quick] --json FILE
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options

BEFORE = "d43a507"
PACKAGES = ("common", "deploy", "learner", "rollout", "scorer")
SECONDS, ROUNDS = 25.0, 2
QUICK_SECONDS, QUICK_ROUNDS = 8.0, 1
LEAST = {"simulated": 0.90, "vllm": 0.85}
"""Least share of seats that decode."""
LEAST_SPEEDUP = 1.5
MOST_ERROR = 0.05
"""Largest difference between the reported share and the measured one."""
ARM_S = 400.0


def export(name: str, directory: Path) -> Path:
    """Unpack a commit so that `prefixrl` and `benchmarks` can be imported from the folder returned."""
    tree = directory / name
    (tree / "prefixrl").mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", name], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    for package in PACKAGES:
        (tree / "prefixrl" / package).symlink_to(tree / package)
    return tree


def run_arm(tree: Path, kind: str, seconds: float) -> dict[str, Any]:
    """One arm's figures, by the program in `tree`."""
    with tempfile.TemporaryDirectory(prefix="seats-") as directory:
        path = Path(directory) / "figures.json"
        # -P: the script's own folder holds other modules of the same names.
        command = [
            sys.executable,
            "-P",
            str(Path(__file__).with_name("seats_arm.py")),
            str(path),
            kind,
            str(seconds),
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, cwd=directory, check=True, timeout=ARM_S)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert found["program"].startswith(str(tree)), (
        f"{found['program']} was measured instead of {tree}"
    )
    return found


def figures_of(kind: str, now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[Figure]:
    """Share, reported share and speed of one kind of engine."""
    names = {"share": "share", "reported": "share", "tokens_per_s": "tokens/s"}
    titles = {
        "share": "seats that decode",
        "reported": "reported busy share",
        "tokens_per_s": "tokens written",
    }
    return [
        mean_figure(
            f"{kind}: {titles[key]}",
            unit,
            [each[key] for each in now],
            [each[key] for each in before],
            "release before",
        )
        for key, unit in names.items()
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Measure, compare with what is claimed, and write."""
    started_s, measured = time.monotonic(), commit()
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    kinds = ("simulated",) if quick else ("simulated", "vllm")
    arms: dict[str, dict[str, list[dict[str, Any]]]] = {
        kind: {"before": [], "now": []} for kind in kinds
    }
    with tempfile.TemporaryDirectory(prefix="releases-") as directory:
        trees = {"before": export(BEFORE, Path(directory)), "now": export("HEAD", Path(directory))}
        for _ in range(rounds):
            for kind in kinds:
                for name, tree in trees.items():
                    found = run_arm(tree, kind, seconds)
                    arms[kind][name].append(found)
                    print(kind, name, found, flush=True)
    figures: list[Figure] = []
    for kind in kinds:
        now, before = arms[kind]["now"], arms[kind]["before"]
        figures += figures_of(kind, now, before)
        for each in now:
            assert each["share"] >= LEAST[kind], f"{kind}: {each['share']:.3f} of the seats decode"
            assert abs(each["reported"] - each["share"]) <= MOST_ERROR, (
                f"{kind}: reported {each['reported']:.3f}"
            )
        assert figures[-1].ratio is not None and figures[-1].ratio >= LEAST_SPEEDUP, (
            f"{kind}: {figures[-1].ratio}"
        )
    settings = {"seconds": seconds, "rounds": rounds, "before": BEFORE, "least_share": LEAST}
    Report("seats", quick, settings, figures, arms, measured).finish(path, started_s)


if __name__ == "__main__":
    main()
