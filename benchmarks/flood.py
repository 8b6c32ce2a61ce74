"""A training run goes on while strangers take the descriptors of its broker and weight server.

The arithmetic example by `prefixrl launch`; both servers may have few open files. The attacker has no key: it connects
to both ports as fast as it can, four times as often as there are files, and again wherever it is cut, in silence. It
takes cores from the run, being a process of this machine: hence the same attack on a broker of no run, with which the
run is compared too. Windows of the three kinds come in turn, so that other load meets them alike.

Afterwards no server was started again, no worker has lost its connection, and `prefixrl inspect --check` finds nothing.

    python -m benchmarks.flood [--quick] --json FILE
"""

import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec

from benchmarks.broker_load import cpu_seconds
from benchmarks.endurance import SAVES_WITHIN_S, STOPPED
from benchmarks.hostile_peers import broker
from benchmarks.kills import RUN_FILE, processes
from benchmarks.results import ROOT, Figure, Report, commit, options
from prefixrl.deploy.runs.inspect import checked

LIMITS = (4096, 1024)
"""Open files of each server, the larger first: a limit is not raised without rights."""
CONNECTS_PER_FILE = 4
KINDS = ("undisturbed", "another broker flooded", "flooded")
SERVERS, ENDPOINTS = ("broker", "weights"), ("endpoint", "weights_endpoint")
EDGE_S = 2.0
"""Time of an attack before and after what is counted."""
WARM_ITERATIONS, WARM_S = 10, 300.0
SETTINGS = (
    "algorithm.iterations=1000000",
    "algorithm.groups_per_iteration=8",
    "evaluation.every=0",
    "checkpoint.every=1000",
)


class Window(msgspec.Struct, frozen=True):
    """One measured stretch."""

    limit: int
    kind: str
    seconds: float
    iterations: int
    connects: int
    """Connections that the attacker began."""
    servers_cpu_s: float
    """CPU time of broker and weight server."""


QUANTITIES: dict[str, Callable[[Window], float]] = {
    "iterations per second": lambda each: each.iterations / each.seconds,
    "CPU seconds of both servers per second": lambda each: each.servers_cpu_s / each.seconds,
}


@contextmanager
def training(folder: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A run by `prefixrl launch`, which is ended by SIGTERM and must have saved."""
    directory = folder / "run"
    flags = [flag for each in (f"directory={directory}", *SETTINGS) for flag in ("--set", each)]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(RUN_FILE), *flags]
    with (folder / "console.log").open("wb") as console:
        launch = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
    try:
        yield directory, launch
    finally:
        launch.send_signal(signal.SIGTERM)
        code = launch.wait(SAVES_WITHIN_S)
    assert code == STOPPED, f"exit code {code}: {(folder / 'console.log').read_text()[-3000:]}"


def iterations(directory: Path) -> int:
    """Return how many iterations were trained."""
    metrics = directory / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def ports_of(directory: Path, *names: str) -> list[int]:
    """Return the ports that the endpoint files name."""
    return [
        int((directory / name).read_text(encoding="utf-8").rpartition(":")[2]) for name in names
    ]


def window(
    directory: Path, servers: list[int], limit: int, kind: str, ports: list[int], seconds: float
) -> Window:
    """Count iterations for so long, while these ports, if any, are flooded."""
    numbers = [CONNECTS_PER_FILE * limit, seconds + EDGE_S, "", *ports]
    with ExitStack() as stack:
        if ports:
            command = [sys.executable, "-m", "benchmarks.strangers", *map(str, numbers)]
            attacker = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            )
            stack.callback(attacker.kill)
            assert attacker.stdout is not None and attacker.stdout.readline() == b"ready\n"
        time.sleep(EDGE_S / 2)
        began_s, before, cpu_before_s = (
            time.monotonic(),
            iterations(directory),
            sum(map(cpu_seconds, servers)),
        )
        time.sleep(seconds)
        passed_s, trained = time.monotonic() - began_s, iterations(directory) - before
        cpu_s = sum(map(cpu_seconds, servers)) - cpu_before_s
        connects = int(attacker.communicate(timeout=60.0)[0]) if ports else 0
    time.sleep(EDGE_S)  # what was cut is closed by then
    return Window(limit, kind, passed_s, trained, connects, cpu_s)


def limit_files(pids: dict[str, list[int]], limit: int) -> None:
    """Let each server have so many open files."""
    for name in SERVERS:
        (pid,) = pids[name]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))


def measure(
    folder: Path, limits: tuple[int, ...], rounds: int, seconds: float
) -> tuple[list[Window], dict[str, str]]:
    """Return the windows, and what became of the run."""
    windows, other = [], folder / "other"
    other.mkdir()
    with broker(other) as (elsewhere, stranger, _), training(folder) as (directory, launch):
        end_s = time.monotonic() + WARM_S
        while iterations(directory) < WARM_ITERATIONS:
            assert launch.poll() is None and time.monotonic() < end_s, (
                folder / "console.log"
            ).read_text()[-3000:]
            time.sleep(0.5)
        pids = processes(launch.pid)
        servers = [pid for name in SERVERS for pid in pids[name]]
        joined = logs(directory).count(" joined from ")
        for limit in limits:
            limit_files(pids, limit)
            resource.prlimit(stranger.pid, resource.RLIMIT_NOFILE, (limit, limit))
            flooded = {
                KINDS[1]: ports_of(elsewhere, "endpoint"),
                KINDS[2]: ports_of(directory, *ENDPOINTS),
            }
            for number in range(rounds):
                for kind in KINDS[:: 1 if number % 2 else -1]:
                    windows.append(
                        window(directory, servers, limit, kind, flooded.get(kind, []), seconds)
                    )
                    print(msgspec.json.encode(windows[-1]).decode(), flush=True)
        after = processes(launch.pid)
        told = {
            "servers that were started again": str(
                sum(pids[name] != after.get(name) for name in SERVERS)
            ),
            "workers that joined again": str(logs(directory).count(" joined from ") - joined),
            "tracebacks": str(logs(directory).count("Traceback")),
        }
    return windows, told | {"inspect --check": checked(directory)}


def logs(directory: Path) -> str:
    """Return what all processes logged."""
    return "".join(
        each.read_text(encoding="utf-8", errors="replace")
        for each in (directory / "logs").iterdir()
    )


def figures_of(windows: list[Window]) -> list[Figure]:
    """Medians of the windows; baseline is the undisturbed ones', or those in which another broker was flooded."""
    found = []
    for limit in dict.fromkeys(each.limit for each in windows):
        by_kind = {
            kind: [each for each in windows if (each.limit, each.kind) == (limit, kind)]
            for kind in KINDS
        }
        for what, of in QUANTITIES.items():
            values = {kind: [of(each) for each in here] for kind, here in by_kind.items()}
            middle = {kind: statistics.median(each) for kind, each in values.items()}
            for kind, against in ((KINDS[1], KINDS[0]), (KINDS[2], KINDS[0]), (KINDS[2], KINDS[1])):
                name = f"{what}, {kind}, {limit} files" + f" (beside {against})" * (
                    against == KINDS[1]
                )
                spread, ratio = (
                    (min(values[kind]), max(values[kind])),
                    middle[kind] / middle[against],
                )
                baseline = middle[against], against, ratio
                text = "median of the windows", "smallest and largest"
                found.append(
                    Figure(name, "1/s", middle[kind], len(values[kind]), spread, *baseline, *text)
                )
    return found


@click.command()
@options
@click.option("--rounds", default=3, show_default=True, help="Windows of each kind at each limit.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of a window.")
def main(path: Path, quick: bool, rounds: int, seconds: float) -> None:
    """Flood a run and write the figures; exit code 1 where a server was started again."""
    measured, started_s = commit(), time.monotonic()
    limits, rounds, seconds = (LIMITS[1:], 1, 5.0) if quick else (LIMITS, rounds, seconds)
    with tempfile.TemporaryDirectory(prefix="flood-") as name:
        windows, told = measure(Path(name), limits, rounds, seconds)
    settings = {"limits": limits, "rounds": rounds, "seconds": seconds, "settings": SETTINGS}
    details = {"windows": windows, "run": told}
    Report("flood", quick, settings, figures_of(windows), details, measured).finish(path, started_s)
    print(told)
    if told["servers that were started again"] != "0":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
