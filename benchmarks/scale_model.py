"""The model of a running system beside runs of the real one: what docs/scale.md predicts with.

Each case is a run of the real broker, weight server, rollouts and scorers as processes with the simulated engine, and
of a learner that takes batches, waits as long as training would take and publishes. The model (`benchmarks/capacity`)
gets what a user of such a run knows or reads from its metrics: numbers of workers, seats, times of rows and of
training, the window, the mean time of a verdict, the time of a publication, bytes and rate of the link; and of the
broker the costs that `benchmarks/broker_load.py` measured. Nothing is fitted to the runs. The first third of every run
is left out, in both; the model's figures are means of five seeds. The link of one case is shaped in a network
namespace, as root.

    python -m benchmarks.scale_model [--quick] --json FILE

Shares are of the time: of all seats of a role, of the learner's time, of the broker's on one core. A ratio is measured
over predicted."""

import ctypes
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from benchmarks.capacity.outlook import foresee
from benchmarks.capacity.system import Foreseen, RowTimes, System, WeightsPath, Workers
from benchmarks.results import Figure, Report, commit, options
from benchmarks.simulated import PROBE_LOGPROBS, daemons, learner, simulated_run, take_batch
from prefixrl.common.run.status import StatusDocument
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes.servers import Servers

ITERATIONS, QUICK_ITERATIONS, ROUNDS = 24, 9, 2
LOOK_S = 0.05
"""Longest step of the simulated engine (`IDLE_S` of the workers' loops)."""
START_S = 120.0
CLONE_NEWNET = 0x40000000
"""Flag of `unshare` for a network of its own."""
MODEL_SEEDS = 5
SEATS = 8
"""Seats of every rollout and scorer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    name: str
    max_staleness: int
    groups: int
    rows: int
    rollouts: int
    scorers: int
    prefix_s: float
    completion_s: float
    """Median time of a row at the target."""
    sigma: float
    limit_s: float
    """Longest time of a row at the target, as a length limit makes it."""
    learner: float
    """Time of training, as a part of what all scorers' seats need for a batch."""
    weights_bytes: int = 16
    link_bytes_per_s: float = math.inf
    """Rate of what the weight server sends; the case then runs in a network of its own."""

    @property
    def mean_s(self) -> float:
        """Mean time of a row at the target."""
        normal, most = (
            statistics.NormalDist(),
            math.log(self.limit_s / self.completion_s) / self.sigma,
        )
        uncut_s = self.completion_s * math.exp(self.sigma**2 / 2)
        return uncut_s * normal.cdf(most - self.sigma) + self.limit_s * (1 - normal.cdf(most))

    @property
    def training_s(self) -> float:
        """Time of an iteration in training."""
        return self.learner * self.groups * self.rows * self.mean_s / (self.scorers * SEATS)


CASES = (
    Case(
        name="S = 0, 2 scorers, learner 40 %, heavy tails",
        max_staleness=0,
        groups=48,
        rows=2,
        rollouts=1,
        scorers=2,
        prefix_s=0.1,
        completion_s=0.25,
        sigma=1.0,
        limit_s=1.3,
        learner=0.4,
    ),
    Case(
        name="S = 1, 4 scorers, learner 60 %, heavy tails",
        max_staleness=1,
        groups=48,
        rows=4,
        rollouts=2,
        scorers=4,
        prefix_s=0.15,
        completion_s=0.3,
        sigma=0.8,
        limit_s=1.2,
        learner=0.6,
    ),
    Case(
        name="S = 2, 2 scorers, learner 40 %, heavy tails",
        max_staleness=2,
        groups=48,
        rows=2,
        rollouts=1,
        scorers=2,
        prefix_s=0.1,
        completion_s=0.25,
        sigma=1.0,
        limit_s=1.3,
        learner=0.4,
    ),
    Case(
        name="S = 2, 8 scorers, learner 150 %, light tails",
        max_staleness=2,
        groups=64,
        rows=4,
        rollouts=2,
        scorers=8,
        prefix_s=0.1,
        completion_s=0.5,
        sigma=0.3,
        limit_s=1.0,
        learner=1.5,
    ),
    Case(
        name="S = 4, 4 scorers, learner 10 %, slow rollout",
        max_staleness=4,
        groups=48,
        rows=2,
        rollouts=1,
        scorers=4,
        prefix_s=0.3,
        completion_s=0.3,
        sigma=0.8,
        limit_s=1.2,
        learner=0.1,
    ),
    Case(
        name="S = 1, 2 scorers, learner 40 %, 48 MiB of weights over 200 Mbit/s",
        max_staleness=1,
        groups=32,
        rows=2,
        rollouts=2,
        scorers=2,
        prefix_s=0.1,
        completion_s=0.25,
        sigma=0.8,
        limit_s=1.0,
        learner=0.4,
        weights_bytes=48 * 2**20,
        link_bytes_per_s=25e6,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A real run, without its first third, and what the model may know of it."""

    groups_per_s: float
    mean_age: float
    busy: dict[str, float]
    judging_s: float
    publish_s: float
    writing_s: float


class Watch:
    """The state of a run at two times."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self.at_s, self.document = time.monotonic(), client.status()
        self.cpu_s = cpu_s(self.document.broker_pid)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(client: BrokerClient, is_true: Callable[[StatusDocument], bool]) -> None:
    """Wait until the status is as wanted."""
    until_s = time.monotonic() + START_S
    while not is_true(client.status()):
        assert time.monotonic() < until_s, f"the workers were not there within {START_S:g} s"
        time.sleep(0.02)


def seats_busy(role: str, before: StatusDocument, after: StatusDocument) -> float:
    """Return the share of a role's seats between the reports in two documents."""
    row_s = seat_s = 0.0
    for old in (each for each in before.workers if each.role == role):
        new = next(each for each in after.workers if each.name == old.name)
        row_s += new.busy_row_s - old.busy_row_s
        seat_s += new.seats * (new.since_first_lease_s - old.since_first_lease_s)
    return row_s / seat_s


def shape(endpoint: str, bytes_per_s: float) -> None:
    """Limit what goes out from the port of an endpoint, in the network of this process."""
    port = endpoint.rpartition(":")[2]
    for command in (
        "tc qdisc add dev lo root handle 1: htb default 1",
        "tc class add dev lo parent 1: classid 1:1 htb rate 10gbit quantum 60000",
        f"tc class add dev lo parent 1: classid 1:2 htb rate {8 * bytes_per_s:.0f}bit quantum 60000",
        f"tc filter add dev lo parent 1: protocol ip u32 match ip sport {port} 0xffff flowid 1:2",
    ):
        subprocess.run(command.split(), check=True)


def measure_apart(case: Case, iterations: int, seed: int) -> Measured:
    """Run the real system in a network of its own, in which the weights come over TCP."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network of its own: this needs root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix=100 * "d") as folder:
        os.environ["RUNTIME_DIRECTORY"] = (
            folder  # too long for the local endpoint, which has no link
        )
        return measure(case, iterations, seed)


def measured(case: Case, iterations: int, seed: int) -> Measured:
    """Run the real system."""
    if math.isinf(case.link_bytes_per_s):
        return measure(case, iterations, seed)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_apart, case, iterations, seed).result()


def measure(case: Case, iterations: int, seed: int) -> Measured:
    """Run the real system in this network."""
    directory = Path(tempfile.mkdtemp(prefix="scale-"))
    skipped, last = iterations // 3, iterations - case.max_staleness - 2
    engine = {"completion_sigma": case.sigma, "accuracy": 1.0, "seats": SEATS}
    times = {
        "prefix_s": case.prefix_s,
        "completion_s": case.completion_s,
        "completion_limit_s": case.limit_s,
    }
    algorithm = {
        "samples_per_prompt": case.rows,
        "minibatches": 1,
        "max_staleness": case.max_staleness,
    }
    algorithm |= {"groups_per_iteration": case.groups, "iterations": iterations}
    sections: dict[str, object] = {
        "simulated": {**engine, **times},
        "algorithm": algorithm,
        "seed": seed,
    }
    config = simulated_run(directory, iterations, case.prefix_s, case.completion_s, **sections)
    run, servers = Path(config.directory), Servers(config, directory / "run", 0)
    if not math.isinf(case.link_bytes_per_s):
        shape(servers.weights_endpoint, case.link_bytes_per_s)
    ages, judging, publishing = list[float](), list[float](), list[float]()
    weights = torch.rand(case.weights_bytes // 4)
    try:
        with ExitStack() as stack:
            client, publisher = stack.enter_context(learner(servers, config))
            publisher.flush(0)
            stack.enter_context(daemons("scorer", case.scorers, run))
            wait_for(
                client,
                lambda status: sum(w.phase == "ready" for w in status.workers) == case.scorers,
            )
            stack.enter_context(daemons("rollout", case.rollouts, run))
            trained_s = 0.0
            for iteration in range(iterations):
                batch, groups = take_batch(client, iteration)
                time.sleep(case.training_s)
                client.iteration_done(iteration, iteration + 1)
                if iteration == skipped - 1:
                    start, trained_s = (
                        Watch(client),
                        -case.training_s,
                    )  # what follows is added below
                if iteration == last - 1:
                    end = Watch(client)
                if skipped <= iteration < last:
                    ages.append(
                        statistics.fmean(iteration - group.version for group in batch.groups)
                    )
                    judging += [text.elapsed_ms / 1000 for group in groups for text in group.texts]
                weights = weights.clone()
                weights[0] = iteration
                published_s = time.monotonic()
                publisher.publish(iteration + 1, {"weight": weights}.items(), PROBE_LOGPROBS)
                publishing.append(time.monotonic() - published_s)
                trained_s += case.training_s + publishing[-1]
                if iteration == last - 1:
                    learner_s = trained_s
            publisher.flush(iterations)
            writing_s = time.monotonic() - published_s
    finally:
        servers.close()
        shutil.rmtree(directory, ignore_errors=True)
    span_s = end.at_s - start.at_s
    return Measured(
        groups_per_s=case.groups * (last - skipped) / span_s,
        mean_age=statistics.fmean(ages),
        busy={
            "learner": learner_s / span_s,
            "broker": (end.cpu_s - start.cpu_s) / span_s,
            **{
                role: seats_busy(role, start.document, end.document)
                for role in ("rollout", "scorer")
            },
        },
        judging_s=statistics.fmean(judging),
        publish_s=statistics.fmean(publishing),
        writing_s=writing_s,
    )


# --- the model ------------------------------------------------------------------------------------------------------


def system_of(case: Case, known: Measured) -> System:
    """Return what a user knows of a case's run."""
    row = RowTimes(
        mean_s=case.completion_s * math.exp(case.sigma**2 / 2),
        sigma=case.sigma,
        limit_s=case.limit_s,
    )
    prefix = RowTimes(mean_s=case.prefix_s)
    return System(
        batch_groups=case.groups,
        rows_per_group=case.rows,
        max_staleness=case.max_staleness,
        rollouts=Workers(count=case.rollouts, seats=SEATS, row=prefix, look_s=LOOK_S),
        scorers=Workers(
            count=case.scorers, seats=SEATS, row=row, look_s=LOOK_S, judging_s=known.judging_s
        ),
        learner_s=case.training_s,
        publish_s=known.publish_s,
        weights=WeightsPath(
            pulled_bytes=case.weights_bytes,
            server_bytes_per_s=case.link_bytes_per_s,
            writing_s=known.writing_s,
        ),
    )


def figures_of(case: Case, runs: list[Measured], foreseen: Foreseen) -> list[Figure]:
    """Return measured figures beside predicted ones."""

    def figure(name: str, unit: str, values: list[float], predicted: float) -> Figure:
        value = statistics.median(values)
        spread = min(values), max(values)
        ratio = value / predicted if predicted else None
        return Figure(
            f"{case.name}: {name}",
            unit,
            value,
            len(values),
            spread,
            predicted,
            "the model",
            ratio,
            "median",
            "least and largest",
        )

    busy = [
        figure(
            f"{part} busy", "share of time", [run.busy[part] for run in runs], foreseen.busy[part]
        )
        for part in ("scorer", "rollout", "learner", "broker")
    ]
    return [
        figure("throughput", "groups/s", [run.groups_per_s for run in runs], foreseen.groups_per_s),
        figure("mean age", "versions", [run.mean_age for run in runs], foreseen.mean_age),
        *busy,
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Run every case, predict it, and write both."""
    started_s, program = time.monotonic(), commit()
    iterations, rounds, cases = (
        (QUICK_ITERATIONS, 1, CASES[:2]) if quick else (ITERATIONS, ROUNDS, CASES)
    )
    runs: dict[str, list[Measured]] = {case.name: [] for case in cases}
    for seed in range(rounds):
        for case in cases:
            runs[case.name].append(measured(case, iterations, seed))
            print(
                case.name,
                runs[case.name][-1],
                foresee(system_of(case, runs[case.name][-1]), 1, iterations),
                flush=True,
            )
    figures, details = list[Figure](), list[dict[str, object]]()
    for case in cases:
        foreseen = foresee(system_of(case, runs[case.name][0]), MODEL_SEEDS, iterations)
        figures += figures_of(case, runs[case.name], foreseen)
        details.append(
            {
                "case": asdict(case),
                "runs": [asdict(run) for run in runs[case.name]],
                "model": asdict(foreseen),
            }
        )
    settings = {
        "iterations": iterations,
        "rounds": rounds,
        "model_seeds": MODEL_SEEDS,
        "look_s": LOOK_S,
    }
    Report("scale_model", quick, settings, figures, details, program).finish(path, started_s)


if __name__ == "__main__":
    main()
