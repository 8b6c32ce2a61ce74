"""The updates of a real run: how many values a training step changes, and what a delta of it weighs.

Runs the arithmetic example with real processes and keeps every snapshot it publishes by a second name: the run
removes old ones.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.folders import versions
from prefixrl.common.wire.messages.weights import Manifest

EXAMPLE = Path(__file__).resolve().parent.parent / "deploy/examples/arithmetic/run.toml"
POLL_S = 0.01


class RealUpdate(msgspec.Struct, frozen=True):
    """One published version against the one before."""

    dtype: str
    actor_lr: float
    version: int
    changed: float
    """Share of the values."""
    share_of_full: float
    """Size of the delta as a share; 1 where none is written because it would not pay."""


def measure(dtype: str, actor_lr: float, iterations: int) -> list[RealUpdate]:
    """Train a few iterations and compare what was published, version by version."""
    place = Path(tempfile.mkdtemp(prefix="real-updates-"))
    try:
        _train(place, dtype, actor_lr, iterations)
        kept = versions(place / "kept")
        return [
            _compare(place / "kept", version, dtype, actor_lr)
            for version in kept
            if version - 1 in kept
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _train(place: Path, dtype: str, actor_lr: float, iterations: int) -> None:
    settings = {
        "learner.dtype": dtype,
        "learner.actor_lr": actor_lr,
        "algorithm.iterations": iterations,
        "evaluation.problems": 8,
        "evaluation.selection_problems": 8,
        "launch.scorers": 1,
        "directory": place / "run",
    }
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(EXAMPLE), "--fresh", *flags]
    with (place / "log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        while child.poll() is None:
            _keep(place / "run" / "weights", place / "kept")
            time.sleep(POLL_S)
    if child.returncode:
        raise RuntimeError((place / "log").read_text(encoding="utf-8")[-3000:])


def _keep(source: Path, target: Path) -> None:
    """Give every snapshot there a second name."""
    for version in versions(source):
        name = f"v{version:08d}"
        if (target / name).exists():
            continue
        beside = target / f".{name}"
        beside.mkdir(parents=True, exist_ok=True)
        try:
            for file in ("weights.bin", "manifest.msgpack"):
                if not (beside / file).exists():
                    os.link(source / name / file, beside / file)
        except FileNotFoundError:
            continue  # removed just now
        beside.rename(target / name)


def _compare(directory: Path, version: int, dtype: str, actor_lr: float) -> RealUpdate:
    place = directory / f"v{version:08d}"
    manifest = msgspec.msgpack.decode((place / "manifest.msgpack").read_bytes(), type=Manifest)
    kind = np.uint16 if dtype == "bfloat16" else np.uint32
    after, before = (
        np.fromfile(directory / f"v{each:08d}" / "weights.bin", dtype=kind)
        for each in (version, version - 1)
    )
    delta = write_delta(directory, version - 1, version)
    share = sum(delta.sizes) / manifest.size_bytes if delta else 1.0
    return RealUpdate(dtype, actor_lr, version, float((after != before).mean()), share)
