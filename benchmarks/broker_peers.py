"""The broker beside Ray actors and Redis streams that do the same hops, in the same run.

In every round, one after the other: the broker with one rollout and two scorers that answer at once (`broker_load.py`),
then the five forms of `peer_hops.py`. All move as many bytes per group, 8 rows of 64 tokens with their text, and hand
over batches of 512. Counted is the CPU of what stands between the workers: the broker with all its threads; Ray's
driver, raylet and global control service, and the actor that is the queue, where there is one; redis-server. Beside it
stands that of the whole system, with the workers and the learner, since a library in these does part of the work too:
it encrypts, or holds the objects of Ray. They do nothing but make the messages; Ray's agents and monitors, which do
nothing for a group, are left out.

The broker does more for it: it encrypts, checks every result against its task, keeps the window and the order of
prompts, renews leases, and has every scored group on disk before it says so. Ray's driver keeps nothing over a crash;
Redis writes its file once a second, and knows of no window, lease or check.

Ray and the Redis client are installed into an environment of their own, `runs/peers`, unless `--python` names the
interpreter of one that has them. Without a redis-server on the PATH, or where they cannot be installed, the benchmark
is left out.

    python -m benchmarks.broker_peers [--python PATH] [--quick] --json FILE
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec

from benchmarks.broker_load import KINDS, measure
from benchmarks.results import ROOT, Figure, LeftOut, Report, commit, options

PEERS = {
    "ray": "Ray actors, by reference",
    "values": "Ray actors, results seen",
    "queue": "Ray, an actor as queue, eight groups per call",
    "single": "Ray, an actor as queue, one group per call",
    "redis": "Redis streams",
}
QUANTITIES = {
    "cpu_ms_per_group": ("CPU per group", "ms"),
    "system_ms_per_group": ("CPU per group, workers and learner too", "ms"),
    "groups_per_s": ("groups per second", "1/s"),
}
WORKERS = 3
PATIENCE_S = 120.0


class Measured(msgspec.Struct, frozen=True):
    """One stretch of one system."""

    cpu_ms_per_group: float
    """CPU time of the processes between the workers."""
    system_ms_per_group: float
    """CPU time of the workers and the learner, too."""
    groups_per_s: float


def environment() -> Path:
    """The interpreter of an environment with the peers, which is made where it is missing."""
    folder = ROOT / "runs" / "peers"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "ray", "redis"]
    if code := subprocess.run(install, check=False).returncode:
        raise LeftOut(
            f"pip cannot install ray and redis into {folder} (exit code {code}, reason above); give the interpreter of "
            "an environment that has them, --python PATH"
        )
    return python


def peer(python: Path, kind: str, span_s: float) -> Measured:
    """One stretch of a peer, in an environment of its own."""
    command = [str(python), str(ROOT / "benchmarks" / "peer_hops.py"), kind, str(span_s)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, timeout=span_s + PATIENCE_S, cwd=os.sep
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


def broker(span_s: float) -> Measured:
    """One stretch of the broker."""
    cell = measure("after", ROOT, WORKERS, False, span_s, None)
    return Measured(
        cell.cpu_ms_per_group, cell.cpu_ms_per_group + cell.others_ms_per_group, cell.groups_per_s
    )


def figures_of(found: dict[str, list[Measured]]) -> list[Figure]:
    """Medians, each with the broker's of the same rounds as its baseline."""
    figures = []
    for kind, rounds in found.items():
        for name, (words, unit) in QUANTITIES.items():
            values, ours = (
                [getattr(each, name) for each in of] for of in (rounds, found["broker"])
            )
            value, against = statistics.median(values), statistics.median(ours)
            label = f"{PEERS.get(kind, 'the broker')}: {words}"
            spread = min(values), max(values)
            is_peer = kind in PEERS
            baseline, ratio = (against, value / against) if is_peer else (None, None)
            beside = "the broker" if is_peer else ""
            figures.append(
                Figure(label, unit, value, len(values), spread, baseline, beside, ratio, *KINDS)
            )
    return figures


@click.command()
@options
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Has Ray and Redis.",
)
@click.option(
    "--span-s", type=float, default=10.0, show_default=True, help="Measured seconds of each."
)
@click.option("--rounds", type=int, default=5, show_default=True)
def main(quick: bool, path: Path, python: Path | None, span_s: float, rounds: int) -> None:
    """Measure and write the figures."""
    at, started_s = commit(), time.monotonic()
    if shutil.which("redis-server") is None:
        raise LeftOut(
            "there is no redis-server on the PATH; install it, for example with `apt-get install redis-server`"
        )
    span_s, rounds = (4.0, 1) if quick else (span_s, rounds)
    python = python.absolute() if python else environment()  # not resolved: it may be a link
    found: dict[str, list[Measured]] = {kind: [] for kind in ("broker", *PEERS)}
    for _ in range(rounds):
        for kind, rounds_of in found.items():
            rounds_of.append(broker(span_s) if kind == "broker" else peer(python, kind, span_s))
            print(kind, rounds_of[-1], flush=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    versions = [
        line for line in listed.stdout.splitlines() if line.startswith(("ray==", "redis=="))
    ]
    server = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    settings = {"span_s": span_s, "rounds": rounds, "versions": [*versions, server]}
    Report("broker_peers", quick, settings, figures_of(found), found, at).finish(path, started_s)


if __name__ == "__main__":
    main()
