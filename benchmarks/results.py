"""The form in which a benchmark writes its figures.

Figures with unit, baseline of the same run, ratio, n and spread; machine and commit.

{"benchmark": "staleness_ablation", "commit": "...", "machine": {...}, "figures": [{"name": ..., "value": ..., ...}],
...}"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

ROOT = Path(__file__).resolve().parent.parent

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95 %, by degrees of freedom from 1; the last serves for more, where it is a little wide."""


class Figure(msgspec.Struct, frozen=True):
    """One measured quantity."""

    name: str
    unit: str
    value: float
    """The mean, or whatever `statistic` says, of the `n` values."""
    n: int
    spread: tuple[float, float]
    """The interval that `spread_kind` names; twice the value where n is 1."""
    baseline: float | None = None
    """The same quantity without what is claimed, measured in the same run; `baseline_name` says where."""
    baseline_name: str = ""
    ratio: float | None = None
    """value / baseline."""
    statistic: str = "mean"
    spread_kind: str = "95 % interval of the mean (Student's t)"


class LeftOut(click.ClickException):
    """A benchmark that cannot run on this machine: what is missing, and what to do about it."""

    exit_code = 77
    """As in other suites of tests: neither done nor failed."""


def mean_figure(
    name: str,
    unit: str,
    values: Sequence[float],
    baseline: Sequence[float] = (),
    baseline_name: str = "",
) -> Figure:
    """The mean of `values` with its interval, against the mean of `baseline` where there is one."""
    mean, spread = t_interval(values)
    against = statistics.fmean(baseline) if baseline else None
    ratio = mean / against if against else None
    return Figure(name, unit, mean, len(values), spread, against, baseline_name, ratio)


def last_quarter(heldout: Sequence[tuple[int, float]]) -> float:
    """Mean reward over the last quarter of the versions, of (version, reward) in their order."""
    end = heldout[-1][0]
    return statistics.fmean(reward for version, reward in heldout if 4 * version >= 3 * end)


def t_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean and its 95 % interval by Student's t; of one value, the value twice."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, (mean, mean)
    t = T_975[min(len(values) - 1, len(T_975)) - 1]
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return mean, (mean - half, mean + half)


class Report(msgspec.Struct):
    """The document; `details` is the benchmark's own."""

    benchmark: str
    is_quick: bool
    settings: dict[str, Any]
    figures: list[Figure]
    details: Any
    commit: str
    """The commit that was measured; read before the work, since the tree may change meanwhile."""
    wall_s: float = 0.0
    machine: dict[str, Any] = {}
    finished: str = ""

    def write(self, path: Path) -> None:
        """Stamp machine and time, and write the document."""
        self.machine = machine()
        self.finished = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def finish(self, path: Path, started_s: float) -> None:
        """Note how long it took since `started_s` (monotonic), write the document, print its figures."""
        self.wall_s = time.monotonic() - started_s
        self.write(path)
        for figure in self.figures:
            against = f", {figure.ratio:.3f} of {figure.baseline_name}" if figure.ratio else ""
            print(f"{figure.name}: {figure.value:.3g} {figure.unit}{against}")


def commit(checkout: Path = ROOT) -> str:
    """The commit that is measured, with `-dirty` where tracked files differ from it; "unknown" outside a repository."""
    command = [
        "git",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def is_committed(measured: str) -> bool:
    """True if `commit` names the measured program exactly."""
    return measured != "unknown" and not measured.endswith("-dirty")


def machine() -> dict[str, Any]:
    """The machine that measured the figures.

    `load` is the number of runnable processes over the last 15 minutes: on a machine that does other work too, seconds
    are not to be compared.
    """
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The two flags every benchmark has: `--quick` and `--json FILE`."""
    json = click.option(
        "--json",
        "path",
        required=True,
        type=click.Path(dir_okay=False, path_type=Path),
        help="Where the figures go.",
    )
    quick = click.option("--quick", is_flag=True, help="A small version that ends within a minute.")
    return quick(json(command))
