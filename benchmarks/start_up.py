"""Start-up: from `launch` to the first iteration, and from a newcomer's start to its first task.

The arithmetic example is launched as it is shipped but for few iterations and evaluations; then a scorer starts by
itself and joins an idle run whose work waits for it, once with the embedded engine and the example's target, once with
the simulated engine. With `--before CHECKOUT`, a folder with another state of the program, every round measures both,
in turn, each watched by a process of its own checkout: two states may speak different protocols. Files are in the page
cache: the first round of each is left out.

    endpoint         the broker's address is in the run directory
    workers ready    every worker has loaded its model
    first iteration  its line is in metrics.jsonl
    hello            the broker knows the scorer
    first lease      the scorer has work
    loading          parts of the time between the two, in a process of its own: modules one after the other, in an
                     order in which each finds loaded what it has in common with those before it
    memory           of each kind of process right after the first iteration: RSS counts shared pages in every process,
                     USS only what a process has alone, PSS shares them out

    python -m benchmarks.start_up [--quick] [--before CHECKOUT] --json FILE
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import click
import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.broker_load import KINDS, program
from benchmarks.results import ROOT, Figure, Report, commit, options
from benchmarks.simulated import daemons, learner, simulated_run
from prefixrl.common.errors import PrefixRLError
from prefixrl.common.run.documents import METRICS_FILE
from prefixrl.common.run.status import StatusDocument, WorkerStatus
from prefixrl.common.wire.address import ENDPOINT_FILE
from prefixrl.deploy.view.run_state import fetch
from prefixrl.learner.processes.servers import Servers

EXAMPLE = Path("deploy/examples/arithmetic")
ITERATIONS = 3
LOOK_S = 0.02
ASK_S = 5.0
PATIENCE_S = 120.0
LAUNCH, ENGINES = "launch", ("transformers", "simulated")
WORKERS = 3
"""Number of workers in the example's launch: a rollout and two scorers."""


class Launched(msgspec.Struct, frozen=True):
    """One launch: seconds since the command was started, memory in MiB by kind of process."""

    arm: str
    endpoint_s: float
    workers_s: float
    iteration_s: float
    cpu_s: float
    """CPU time of all its processes until then."""
    memory: dict[str, tuple[int, float, float, float]]
    """Number of processes, RSS, USS and PSS of one, by title."""


class Joined(msgspec.Struct, frozen=True):
    """One newcomer: seconds since its process was started."""

    arm: str
    engine: str
    hello_s: float
    lease_s: float
    rss_mib: float


class Loaded(msgspec.Struct, frozen=True):
    """The loading of one embedded scorer: seconds by part."""

    parts: dict[str, float]


JOINING: tuple[tuple[str, str, Callable[[Joined], float]], ...] = (
    ("start to hello", "s", lambda each: each.hello_s),
    ("hello to first lease", "s", lambda each: each.lease_s - each.hello_s),
    ("start to first lease", "s", lambda each: each.lease_s),
    ("RSS", "MiB", lambda each: each.rss_mib),
)
BEFORE_HELLO = (
    "prefixrl.common.worker.allowed",
    "prefixrl.common.worker.join",
    "prefixrl.common.worker.numbers",
)
PARTS = {
    "torch": ("torch",),
    "sympy": ("sympy",),
    "scipy": ("scipy.optimize",),
    "torch.distributed.tensor": ("torch.distributed.tensor",),
    "torch._dynamo": ("torch._dynamo",),
    "transformers, list of its modules": ("transformers", "transformers.models"),
    "transformers, the rest": (
        "prefixrl.common.engines.embedded.continuous",
        "transformers.models.llama.modeling_llama",
    ),
    "prefixrl": (
        "prefixrl.scorer.start",
        "prefixrl.scorer.loop",
        "prefixrl.common.engines.vllm.setup",
    ),
}
"""Modules that a scorer with the embedded engine imports after its hello."""
LOAD = """
import importlib, json, sys, time
from prefixrl.common.host.process import without_gc
model, before, parts = json.loads(sys.argv[1])
with without_gc():
    for name in before:
        importlib.import_module(name)
    found = {}
    for part, names in parts.items():
        from_s = time.monotonic()
        for name in names:
            importlib.import_module(name)
        found[part] = time.monotonic() - from_s
from prefixrl.common.engines.embedded.continuous import TransformersEngine, objection
from prefixrl.common.prompts.rendering import Renderer
from_s = time.monotonic()
assert not objection(model)
TransformersEngine(model, "cpu", "auto", 1), Renderer(model, 256, role="scorer")
found["model and tokenizer"] = time.monotonic() - from_s
print(json.dumps(found))
"""
Measured = TypeVar("Measured", Launched, Joined)


def wait_for(found: Callable[[], bool], process: "subprocess.Popen[bytes]", from_s: float) -> float:
    """Return the time since `from_s` at which something was found."""
    while not found():
        assert process.poll() is None, f"ended with exit code {process.returncode}"
        assert time.monotonic() - from_s < PATIENCE_S
        time.sleep(LOOK_S)
    return time.monotonic() - from_s


def workers(directory: Path) -> list[WorkerStatus]:
    """Return what the broker knows of its workers."""
    with suppress(PrefixRLError):
        return msgspec.json.decode(fetch(directory, ASK_S), type=StatusDocument).workers
    return []


# --- a launch ---------------------------------------------------------------------------------------------------------


def launched() -> Launched:
    """Launch the example until its first iteration is trained."""
    folder = Path(tempfile.mkdtemp(prefix="start-up-"))
    run = folder / "run"
    settings = {
        "directory": run,
        "algorithm.iterations": ITERATIONS,
        "evaluation.problems": 8,
        "evaluation.selection_problems": 8,
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "launch",
        str(ROOT / EXAMPLE / "run.toml"),
        *flags,
    ]
    from_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        endpoint_s = wait_for((run / ENDPOINT_FILE).exists, process, from_s)
        workers_s = wait_for(lambda: are_ready(workers(run)), process, from_s)
        metrics = run / METRICS_FILE
        iteration_s = wait_for(
            lambda: metrics.exists() and b"\n" in metrics.read_bytes(), process, from_s
        )
        memory, cpu_s = family(process.pid)
        assert process.wait() == 0
    shutil.rmtree(folder)
    return Launched("", endpoint_s, workers_s, iteration_s, cpu_s, memory)


def are_ready(found: Sequence[WorkerStatus]) -> bool:
    return len(found) == WORKERS and all(each.phase != "loading" for each in found)


def family(pid: int) -> tuple[dict[str, tuple[int, float, float, float]], float]:
    """Return memory in MiB by title, and CPU seconds, of a process and all under it."""
    root = psutil.Process(pid)
    found: dict[str, list[tuple[float, float, float]]] = {}
    cpu_s = 0.0
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            times, size = each.cpu_times(), each.memory_full_info()
            title = "launch" if each.pid == pid else (each.cmdline() or [""])[0]
            found.setdefault(title, []).append(
                (size.rss / 2**20, size.uss / 2**20, size.pss / 2**20)
            )
            cpu_s += times.user + times.system
    means = {
        title: (len(sizes), *(statistics.fmean(size) for size in zip(*sizes, strict=True)))
        for title, sizes in found.items()
    }
    return msgspec.convert(means, dict[str, tuple[int, float, float, float]]), cpu_s


# --- a newcomer -------------------------------------------------------------------------------------------------------


def joined(engine: str) -> Joined:
    """Start a scorer beside a run whose prefixes wait for one."""
    with idle_run(engine) as directory:
        command = [sys.executable, "-m", "prefixrl.scorer", "--run", str(directory)]
        from_s = time.monotonic()
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            hello_s = wait_for(lambda: bool(scorers(directory)), process, from_s)
            lease_s = wait_for(lambda: has_work(scorers(directory)), process, from_s)
            rss_mib = psutil.Process(process.pid).memory_info().rss / 2**20
            process.kill()
    return Joined("", engine, hello_s, lease_s, rss_mib)


def scorers(directory: Path) -> list[WorkerStatus]:
    return [each for each in workers(directory) if each.role == "scorer"]


def has_work(found: Sequence[WorkerStatus]) -> bool:
    return any(each.leases or each.tasks_done for each in found)


@contextmanager
def idle_run(engine: str) -> Iterator[Path]:
    """A run whose rollout has filled the window; the targets are the example's."""
    folder = Path(tempfile.mkdtemp(prefix="start-up-"))
    scorer = {"engine": engine, "max_new_tokens": 20, "device": "cpu"}
    target = {"model": str(ROOT / EXAMPLE / "target")}
    config = simulated_run(folder, 4, 0.01, 0.05, scorer=scorer, target=target)
    directory = Path(config.directory)
    servers = Servers(config, directory, 0)
    try:
        with daemons("rollout", 1, directory), learner(servers, config):
            wait_for_work(directory)
            yield directory
    finally:
        servers.close()
        shutil.rmtree(folder)


def wait_for_work(directory: Path) -> None:
    from_s = time.monotonic()
    while not any(each.tasks_done for each in workers(directory)):
        assert time.monotonic() - from_s < PATIENCE_S
        time.sleep(LOOK_S)


# --- its imports ------------------------------------------------------------------------------------------------------


def loaded() -> Loaded:
    """Load what an embedded scorer loads after its hello, part by part."""
    asked = msgspec.json.encode((str(ROOT / EXAMPLE / "target"), BEFORE_HELLO, PARTS)).decode()
    command = [sys.executable, "-c", LOAD, asked]
    done = subprocess.run(
        command, env=program(ROOT), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return Loaded(msgspec.json.decode(done.stdout, type=dict[str, float]))


# --- the figures ------------------------------------------------------------------------------------------------------


def measured(arm: str, checkout: Path, what: str, kind: type[Measured]) -> Measured:
    """Return what a process with the program of a checkout, its helpers included, measures."""
    environment = program(checkout)
    environment["PYTHONPATH"] += f"{os.pathsep}{checkout}"
    command = [sys.executable, "-P", __file__, what]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=kind), arm=arm)


class Details(msgspec.Struct, frozen=True):
    """Every value."""

    launches: list[Launched]
    newcomers: list[Joined]
    loads: list[Loaded]


def figures_of(details: Details) -> list[Figure]:
    """Return medians; where there are two arms, against the other checkout's."""
    times: dict[str, Callable[[Launched], float]] = {
        "launch to endpoint": lambda each: each.endpoint_s,
        "launch to workers ready": lambda each: each.workers_s,
        "launch to first iteration": lambda each: each.iteration_s,
        "CPU until the first iteration, all processes": lambda each: each.cpu_s,
    }
    found = [_figure(name, "s", *_arms(details.launches, of)) for name, of in times.items()]
    for engine in ENGINES:
        here = [each for each in details.newcomers if each.engine == engine]
        found += [
            _figure(f"newcomer, {engine}: {name}", unit, *_arms(here, of))
            for name, unit, of in JOINING
        ]
    for part in details.loads[0].parts:
        found.append(
            _figure(
                f"newcomer, transformers: loading, {part}",
                "s",
                [each.parts[part] for each in details.loads],
                [],
            )
        )
    titles = sorted({title for each in details.launches for title in each.memory})
    for title in titles:
        for place, kind in enumerate(("RSS", "USS", "PSS"), start=1):
            sizes = _arms(details.launches, _size_of(title, place))
            found.append(_figure(f"{title}: {kind}", "MiB", *sizes))
    sums = _arms(
        details.launches, lambda each: sum(size[0] * size[3] for size in each.memory.values())
    )
    return [*found, _figure("all processes of the launch: PSS", "MiB", *sums)]


def _size_of(title: str, place: int) -> Callable[[Launched], float | None]:
    return lambda each: each.memory[title][place] if title in each.memory else None


def _arms(
    starts: Sequence[Measured], of: Callable[[Measured], float | None]
) -> tuple[list[float], list[float]]:
    both = ([of(each) for each in starts if each.arm == arm] for arm in ("after", "before"))
    after, before = ([each for each in values if each is not None] for values in both)
    return after, before


def _figure(name: str, unit: str, after: list[float], before: list[float]) -> Figure:
    value, against = statistics.median(after), statistics.median(before) if before else None
    ratio = value / against if against else None
    spread = (min(after), max(after))
    return Figure(
        name, unit, value, len(after), spread, against, "before" if before else "", ratio, *KINDS
    )


@click.command()
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@options
def main(before: Path | None, rounds: int, path: Path, quick: bool) -> None:
    """Measure how long a run and a newcomer take to begin."""
    started_s, at = time.monotonic(), commit()
    os.environ["OMP_NUM_THREADS"] = "1"
    arms = {"after": ROOT} | ({"before": before.resolve()} if before else {})
    rounds = 1 if quick else rounds
    details = Details([], [], [])
    for number in range(0 if quick else -1, rounds):
        launches = [measured(arm, checkout, LAUNCH, Launched) for arm, checkout in arms.items()]
        newcomers = [
            measured(arm, checkout, engine, Joined)
            for engine in ENGINES
            for arm, checkout in arms.items()
        ]
        if number >= 0:
            details.launches.extend(launches)
            details.newcomers.extend(newcomers)
            details.loads.append(loaded())
    settings = {"rounds": rounds, "iterations": ITERATIONS} | (
        {"before": commit(before)} if before else {}
    )
    Report("start_up", quick, settings, figures_of(details), details, at).finish(path, started_s)


if __name__ == "__main__":
    if sys.argv[1:] in ([LAUNCH], *([each] for each in ENGINES)):  # in a process of `measured`
        found = launched() if sys.argv[1] == LAUNCH else joined(sys.argv[1])
        sys.stdout.buffer.write(msgspec.json.encode(found))
    else:
        main()
