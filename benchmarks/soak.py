"""Processes of a run are killed again and again: nothing is lost, doubled or too old.

A real broker, weight server, publisher, journal, rollout and scorers with the simulated engine (declared latencies, no
model), and a learner whose optimiser only counts: it takes batches, "trains" for a while, writes the groups it trained
into a file of its own, and a counter as its checkpoint. SIGKILLs come at exponential times, seeded, to workers, to the
broker and to the learner, whose servers die with it; most of them while the learner trains. Workers are forked from a
warm process, or most of the time would be spent on imports.

    driver ──SIGKILL──▶ scorers, rollout     started again at once
           ──SIGKILL──▶ learner, broker      the learner resumes at its newest counter, the broker from its journal

Afterwards the journal alone must prove a clean history (`common/journal/history.py`), and what the learner noted
must be its batches, each trained by whoever completed it, in the same groups.

    python -m benchmarks.soak [--quick] --json FILE
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import click

from benchmarks.results import Figure, Report, commit, options
from benchmarks.simulated import PATIENCE_S, PROBE, PROBE_LOGPROBS, simulated_run
from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.journal import journal
from prefixrl.common.journal.history import History, history
from prefixrl.learner.run.stop import StopSignal

STALENESS, GROUPS, ROWS, SCORERS = 2, 32, 16, 3
TRAINS_S = 0.3
MID_TRAINING = 0.85
"""Share of the kills that wait for the learner to train."""
CHECKPOINT_EVERY = 8
"""Iterations between the counters that a learner resumes from."""
MOST_S = 3600.0
ENGINE = {"prefix_s": 0.005, "completion_s": 0.02, "completion_sigma": 0.5, "accuracy": 1.0}
COUNTER, TRAINED, NOW = "counter", "trained.jsonl", "training_now"
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Size:
    """Kills per role, and the samples that must be trained."""

    scorers: int
    rollouts: int
    learners: int
    """Learner or broker, in turn."""
    samples: int
    mean_gap_s: float
    """Mean seconds between two kills."""

    @property
    def iterations(self) -> int:
        """Iterations that train so many samples."""
        return -(-self.samples // (GROUPS * ROWS))


FULL = Size(scorers=500, rollouts=100, learners=60, samples=300_000, mean_gap_s=0.5)
QUICK = Size(scorers=8, rollouts=3, learners=4, samples=12_000, mean_gap_s=0.7)


@dataclass
class Outcome:
    """Kills, and the history that the journal tells."""

    kills: Counter[str] = field(default_factory=Counter)
    in_training: int = 0
    """Kills of any process while the learner trained."""
    history: History = field(default_factory=lambda: History(STALENESS))
    faults: list[str] = field(default_factory=list)
    trained_again: int = 0
    """Iterations that a learner trained which resumed before them."""
    wall_s: float = 0.0


# --- processes ------------------------------------------------------------------------------------------------------


def worker(role: str, number: str, directory: str) -> None:
    """A rollout or scorer as its command starts it."""
    _own_log(Path(directory), role)
    sys.argv = [f"prefixrl-{role}"]
    if role == "rollout":
        from prefixrl.rollout.__main__ import main
    else:
        from prefixrl.scorer.__main__ import main
    main(["--run", directory, "--number", number, "--grace-s", "0"], standalone_mode=False)


def learner(directory: str) -> None:
    """A learner that counts: it resumes at its counter and ends with the run."""
    _own_log(Path(directory), "learner")
    with (
        exit_codes()
    ):  # 4 where its broker is killed at its start, as of any learner: it is started again
        _learn(Path(directory))


def _learn(folder: Path) -> None:
    import torch

    from prefixrl.common.wire.messages.learner import Batch, GetBatch
    from prefixrl.learner.broker.client import BrokerClient
    from prefixrl.learner.processes.servers import Servers
    from prefixrl.learner.weights.publish import Publisher

    config = from_json((folder / "config.json").read_text(encoding="utf-8"))
    completed = int((folder / COUNTER).read_text()) if (folder / COUNTER).exists() else 0
    servers = Servers(config, folder, completed)
    stop = StopSignal(servers=servers)
    client = BrokerClient(servers.address, stop)
    publisher = Publisher(servers.address, folder / "weights", PROBE, False, stop)
    while True:
        publisher.publish(completed, {"weight": torch.zeros(4)}.items(), PROBE_LOGPROBS)
        answer = client.next_batch(GetBatch(completed, 0, 1), PATIENCE_S)
        if not isinstance(answer, Batch):
            break
        groups = client.groups(completed, range(len(answer.groups)))
        (folder / NOW).touch()
        time.sleep(TRAINS_S)
        line = json.dumps(
            {"iteration": completed, "seqs": [each.prefixes.seq for each in groups.values()]}
        )
        _append(folder / TRAINED, line)
        (folder / NOW).unlink(missing_ok=True)
        servers.completed = completed = completed + 1
        client.iteration_done(completed - 1, completed)
        if completed % CHECKPOINT_EVERY == 0:
            temporary = folder / f".{COUNTER}"
            temporary.write_text(str(completed))
            temporary.replace(folder / COUNTER)
    servers.expect_end()
    client.stop("the run is finished")
    client.close()
    publisher.close()
    (folder / "finished").touch()


def _append(path: Path, line: str) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def _own_log(folder: Path, name: str) -> None:
    descriptor = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


# --- the soak -------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """The processes of one run, and the kills that are left."""

    directory: Path
    size: Size
    random: random.Random
    outcome: Outcome = field(default_factory=Outcome)
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a process of this name, in place of one that was killed."""
        role, number = name.split("-")
        target: Callable[..., None] = learner if role == "learner" else worker
        arguments = (
            (str(self.directory),) if role == "learner" else (role, number, str(self.directory))
        )
        self.processes[name] = _CONTEXT.Process(
            target=target, args=arguments, name=name, daemon=False
        )
        self.processes[name].start()

    def victims(self) -> list[str]:
        """List the roles that are still to be killed, each as often as it is left."""
        left = {
            "scorer": self.size.scorers,
            "rollout": self.size.rollouts,
            "learner": self.size.learners,
        }
        killed = self.outcome.kills
        done = {"learner": killed["learner"] + killed["broker"]}
        return [
            role for role, most in left.items() for _ in range(most - done.get(role, killed[role]))
        ]

    def kill(self, role: str) -> None:
        """Send SIGKILL to one process of a role, mostly while the learner trains."""
        deadline_s = time.monotonic() + (2.0 if self.random.random() < MID_TRAINING else 0.0)
        while not self.is_training() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        self.outcome.in_training += self.is_training()
        if role == "learner":
            self._kill_learner()
            return
        name = "rollout-0" if role == "rollout" else f"scorer-{self.random.randrange(SCORERS)}"
        victim = self.processes[name]
        if victim.pid and victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            self.outcome.kills[role] += 1
        victim.join(10.0)
        self.start(name)

    def _kill_learner(self) -> None:
        process = self.processes["learner-0"]
        number = self.outcome.kills["learner"] + self.outcome.kills["broker"]
        victims = [process.pid] if number % 2 == 0 else _broker_of(process.pid)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    self.outcome.kills["learner" if number % 2 == 0 else "broker"] += 1
        if number % 2 == 0:
            process.join(10.0)
            (self.directory / NOW).unlink(missing_ok=True)
            self.start("learner-0")

    def keep_up(self) -> None:
        """Start again what ended by itself; raise where that is a fault."""
        for name, process in list(self.processes.items()):
            if process.is_alive() or self.is_finished():
                continue
            role = name.split("-")[0]
            # A learner whose broker died once too often, or a worker that waited too long for either, may end with 4.
            if process.exitcode not in (0, 4, -signal.SIGKILL):
                path = self.directory / f"{role}.log"
                log = path.read_text(errors="replace")[-3000:] if path.exists() else "no log"
                raise AssertionError(f"{name} ended with exit code {process.exitcode}:\n{log}")
            self.start(name)

    def is_training(self) -> bool:
        """Return True while the learner trains an iteration."""
        return (self.directory / NOW).exists()

    def is_finished(self) -> bool:
        """Return True when the learner has trained everything."""
        return (self.directory / "finished").exists()

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10.0)


def _broker_of(pid: int | None) -> list[int]:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(each) for each in children if _title(each) == b"prefixrl-broker"]
    return []


def _title(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]


def soak(folder: Path, size: Size, seed: int, says: Callable[[str], None] = print) -> Outcome:
    """Run to the end with kills; return what the journal tells."""
    config = _config(folder, size)
    directory, begun_s = Path(config.directory), time.monotonic()
    run = Soak(directory, size, random.Random(seed))
    with _warm():
        try:
            for name in ("learner-0", "rollout-0", *(f"scorer-{each}" for each in range(SCORERS))):
                run.start(name)
            told_s = next_s = time.monotonic()
            while not run.is_finished():
                assert time.monotonic() - begun_s < MOST_S, (
                    f"not finished after {MOST_S:g} s: {run.outcome.kills}"
                )
                run.keep_up()
                if time.monotonic() >= next_s and (victims := run.victims()):
                    run.kill(run.random.choice(victims))
                    next_s = time.monotonic() + run.random.expovariate(1.0 / size.mean_gap_s)
                if time.monotonic() - told_s > 10.0:
                    told_s = time.monotonic()
                    says(
                        f"{told_s - begun_s:.0f} s: {_trained(directory)} iterations, kills {dict(run.outcome.kills)}"
                    )
                time.sleep(0.02)
        finally:
            run.close()
    run.outcome.wall_s = time.monotonic() - begun_s
    return _checked(config, run.outcome)


@contextlib.contextmanager
def _warm() -> Iterator[None]:
    _CONTEXT.set_forkserver_preload(["prefixrl.scorer.start", "prefixrl.rollout.start", "torch"])
    yield


def _config(folder: Path, size: Size) -> RunConfig:
    return simulated_run(
        folder,
        size.iterations,
        0.0,
        0.0,
        simulated=ENGINE,
        algorithm={
            "groups_per_iteration": GROUPS,
            "samples_per_prompt": ROWS,
            "minibatches": 1,
            "iterations": size.iterations,
            "max_staleness": STALENESS,
        },
        broker={
            "silence_s": 4.0,
            "heartbeat_s": 0.5,
            "attempts": 1000,
            "requeues": 1000,
            "max_failure_share": 1.0,
        },
    )


def _trained(directory: Path) -> int:
    path = directory / TRAINED
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _checked(config: RunConfig, outcome: Outcome) -> Outcome:
    """Check the journal's history, and the learner's own against it."""
    directory = Path(config.directory)
    found = outcome.history = history(journal.read(directory / journal.FOLDER), STALENESS)
    faults = found.finished_faults()
    trained: Counter[int] = Counter()
    for text in (directory / TRAINED).read_text().splitlines():
        line = json.loads(text)
        iteration, seqs = line["iteration"], tuple(line["seqs"])
        trained[iteration] += 1
        if iteration >= len(found.batches) or found.batches[iteration] != seqs:
            faults.append(
                f"the learner trained iteration {iteration} on other groups than the journal has"
            )
    missing = [each for each in range(len(found.batches)) if not trained[each]]
    if missing:
        faults.append(f"iterations {missing[:5]} are in the journal and were not trained")
    outcome.faults, outcome.trained_again = faults, sum(trained.values()) - len(trained)
    return outcome


def figures_of(outcome: Outcome) -> list[Figure]:
    """The counts of a soak."""
    found = outcome.history
    values = {
        "samples trained": (found.rows, "samples"),
        "iterations": (len(found.batches), "1"),
        "iterations trained again after a resume": (outcome.trained_again, "1"),
        "faults: lost, doubled, too old, out of order": (len(outcome.faults), "1"),
        "kills in mid-training": (outcome.in_training, "1"),
        **{f"kills: {role}": (count, "1") for role, count in outcome.kills.items()},
        **{f"groups: {state}": (count, "1") for state, count in found.counts.items()},
        "oldest sample": (max(found.ages, default=0), "versions"),
        "speed": (found.rows / outcome.wall_s, "samples/s"),
    }
    return [Figure(name, unit, value, 1, (value, value)) for name, (value, unit) in values.items()]


@click.command()
@options
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where the run's files stay; without it they go.",
)
def main(path: Path, quick: bool, seed: int, folder: Path | None) -> None:
    measured_commit, started_s, size = commit(), time.monotonic(), QUICK if quick else FULL
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        outcome = soak(place, size, seed, lambda text: print(text, flush=True))
    settings = {
        "seed": seed,
        "staleness": STALENESS,
        "groups": GROUPS,
        "rows": ROWS,
        "scorers": SCORERS,
    }
    details = {
        "faults": outcome.faults,
        "ages": {str(age): count for age, count in sorted(outcome.history.ages.items())},
    }
    report = Report("soak", quick, settings, figures_of(outcome), details, measured_commit)
    report.finish(path, started_s)
    if outcome.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
