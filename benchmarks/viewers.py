"""The cost of viewers of `prefixrl dashboard` to the run that they look at, and the opening of a long run.

The arithmetic example trains; windows with no viewer and with ten come in turn, so that other load meets both alike.
The viewers are streams of this host and read every event. Then the run's `metrics.jsonl` is continued to 50,000
iterations by its own lines, and the page's first event is asked for: seconds until it is whole, and the resident memory
of the dashboard afterwards. CPU time is that of the dashboard's process, in shares of a core.

    python -m benchmarks.viewers [--quick] --json FILE
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import httpx2

from benchmarks.broker_load import cpu_seconds
from benchmarks.flood import EDGE_S, WARM_ITERATIONS, WARM_S, iterations, training
from benchmarks.results import Figure, Report, commit, options

VIEWERS = 10
LONG, QUICK_LONG = 50_000, 5_000
ROUNDS, WINDOW_S = 6, 20.0
START_S = 60.0


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A dashboard of a folder; its address and process."""
    command = [sys.executable, "-m", "prefixrl.deploy", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            yield line[line.index("http") :].split()[0].rstrip("/"), process
        finally:
            process.terminate()


def view(address: str, run: str, is_over: threading.Event, opened: threading.Event) -> None:
    """Read events of a run until it is over."""
    with httpx2.stream("GET", f"{address}/api/follow", params={"run": run}, timeout=60.0) as answer:
        for _ in answer.iter_lines():
            opened.set()
            if is_over.is_set():
                return


@contextmanager
def viewers(address: str, run: str, count: int) -> Iterator[None]:
    """So many viewers, each of whom has seen the page's first event."""
    is_over, opened = threading.Event(), [threading.Event() for _ in range(count)]
    threads = [threading.Thread(target=view, args=(address, run, is_over, each)) for each in opened]
    for thread in threads:
        thread.start()
    try:
        assert all(each.wait(START_S) for each in opened), "a viewer got no event"
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def windows(folder: Path, rounds: int, seconds: float) -> dict[int, list[tuple[float, float]]]:
    """Iterations per second and the dashboard's share of a core, by number of viewers."""
    found: dict[int, list[tuple[float, float]]] = {0: [], VIEWERS: []}
    with training(folder) as (directory, launch), ExitStack() as stack:
        end_s = time.monotonic() + WARM_S
        while iterations(directory) < WARM_ITERATIONS:
            assert launch.poll() is None and time.monotonic() < end_s, (
                folder / "console.log"
            ).read_text()[-3000:]
            time.sleep(0.5)
        address, process = stack.enter_context(dashboard(directory))
        for number in range(rounds):
            for count in (0, VIEWERS) if number % 2 else (VIEWERS, 0):
                with viewers(address, directory.name, count):
                    time.sleep(EDGE_S)
                    began_s, before, cpu_s = (
                        time.monotonic(),
                        iterations(directory),
                        cpu_seconds(process.pid),
                    )
                    time.sleep(seconds)
                    passed_s = time.monotonic() - began_s
                    rate = (iterations(directory) - before) / passed_s
                    found[count].append((rate, (cpu_seconds(process.pid) - cpu_s) / passed_s))
                    print(count, found[count][-1], flush=True)
    return found


def lengthen(directory: Path, count: int) -> None:
    """Continue the metrics of a run to so many iterations by its own lines."""
    path = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open("a", encoding="utf-8") as file:
        for iteration in range(lines[-1]["iteration"] + 1, count):
            file.write(json.dumps({**lines[iteration % len(lines)], "iteration": iteration}) + "\n")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return (
        int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        * resource.getpagesize()
        / 2**20
    )


def opened(directory: Path) -> tuple[float, float]:
    """Seconds until a fresh dashboard has told the whole run, and its resident MiB."""
    with dashboard(directory) as (address, process):
        assert httpx2.get(f"{address}/api/runs", timeout=60.0).status_code == 200
        began_s = time.monotonic()
        with httpx2.stream(
            "GET", f"{address}/api/follow", params={"run": directory.name}, timeout=60.0
        ) as answer:
            told = json.loads(
                next(line for line in answer.iter_lines() if line.startswith("data: "))[6:]
            )
        took_s = time.monotonic() - began_s
        assert told[directory.name]["curves"]
        return took_s, resident_mib(process.pid)


def figures_of(
    found: dict[int, list[tuple[float, float]]], took_s: list[float], held: list[float]
) -> list[Figure]:
    """Medians of the windows, and of the openings."""
    rates = {count: [rate for rate, _ in each] for count, each in found.items()}
    alone, shares = statistics.median(rates[0]), [share for _, share in found[VIEWERS]]
    return [
        _figure(f"iterations per second with {VIEWERS} viewers", "1/s", rates[VIEWERS], alone),
        _figure(f"dashboard's share of a core with {VIEWERS} viewers", "cores", shares),
        _figure("opening of the long run", "s", took_s),
        _figure("memory of the dashboard afterwards", "MiB", held),
    ]


def _figure(name: str, unit: str, values: list[float], alone: float | None = None) -> Figure:
    middle, spread = statistics.median(values), (min(values), max(values))
    ratio, beside = (middle / alone, "no viewer") if alone else (None, "")
    return Figure(
        name,
        unit,
        middle,
        len(values),
        spread,
        alone,
        beside,
        ratio,
        "median",
        "smallest and largest",
    )


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """View a run and write the figures."""
    measured, started_s = commit(), time.monotonic()
    rounds, seconds, long = (1, 5.0, QUICK_LONG) if quick else (ROUNDS, WINDOW_S, LONG)
    with tempfile.TemporaryDirectory(prefix="viewers-") as name:
        found = windows(Path(name), rounds, seconds)
        lengthen(Path(name) / "run", long)
        took_s, held = zip(*(opened(Path(name) / "run") for _ in range(3)), strict=True)
    settings = {"viewers": VIEWERS, "rounds": rounds, "seconds": seconds, "iterations": long}
    figures = figures_of(found, list(took_s), list(held))
    Report("viewers", quick, settings, figures, {"windows": found}, measured).finish(
        path, started_s
    )


if __name__ == "__main__":
    main()
