"""A run without models.

A real broker over real ZeroMQ, the real loops of rollouts and scorers, a learner that only reads.

Engines are simulated: they take the declared times and write the version they have installed into every token. Weights
are at hand instead of fetched, and answers are compared instead of verified: neither has to do with how old a sample
may become."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.run.digests import scorer_digests
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.messages import learner as messages
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import Goodbye
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens, token_ids, token_versions
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.work_loop import WorkLoop
from prefixrl.learner.broker.server import Broker
from prefixrl.rollout.loop import Rollout
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.fakes import Peer, endpoint_of, groups_of, run_on_disk, serving, status, wait_until
from support.keys import address

PROBE = pack_tokens([1, 2, 3])
PATIENCE_S = 60.0


def weights(version: int) -> Snapshot:
    """The snapshot published as a version; 0 is what a simulated engine starts with."""
    return snapshot_of(version, {"weight": torch.full((4,), float(version))})


def note(version: int) -> WeightsNote:
    """The announcement of a version."""
    return WeightsNote(version, weights(version).manifest.digest, PROBE, pack_logprobs([0.0, 0.0]))


class WeightsAtHand:
    """Every version is there at once."""

    def __init__(self) -> None:
        self._wanted = self._taken = 0

    def want_version(self, version: int, digest: str) -> None:
        self._wanted = max(self._wanted, version)

    def use(self, endpoint: str) -> None:
        pass

    def again(self) -> None:
        self._taken = 0

    def take_snapshot(self) -> Snapshot | None:
        if self._taken >= self._wanted:
            return None
        self._taken = self._wanted
        return weights(self._taken)


class Comparison:
    """A verifier that compares texts."""

    trouble, is_patient = "", False

    def __init__(self) -> None:
        self._done: list[tuple[int, Judgement]] = []

    def submit(self, key: int, text: str, gold: str, *_: object) -> None:
        is_right = text.endswith(f"\\boxed{{{gold}}}")
        self._done.append((key, Judgement(float(is_right), "ok", None)))

    def poll(self) -> list[tuple[int, Judgement]]:
        done, self._done = self._done, []
        return done


@dataclass
class Trained:
    """The groups that a learner received, read from the samples themselves."""

    groups: list[int] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    """Trained groups by age: the iteration less the oldest version in their tokens."""
    crossed: int = 0
    """Trained groups with tokens of several versions."""
    versions: list[set[int]] = field(default_factory=list)
    """Per iteration, the versions in the tokens of its batch."""
    rewards: list[tuple[float, ...]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    end: messages.FromBroker | None = None

    def take(self, batch: messages.Batch, groups: list[ScoredGroup], may_cross: bool) -> None:
        assert len(groups) == len(batch.groups), "one rank trains every group"
        versions = set()
        for group in groups:
            written = set()
            for row in group.prefixes.rows:
                tokens = token_ids(row.tokens).tolist()
                assert tokens == token_versions(row).tolist(), "spans say what the tokens say"
                written.update(tokens)
            assert len(written) == 1 or may_cross, "one version per group"
            self.crossed += len(written) > 1
            version = min(written)
            assert group.version <= version
            versions.update(written)
            self.ages[batch.iteration - version] += 1
            self.groups.append(group.prefixes.seq)
            self.rewards.append(tuple(verdict.reward for verdict in group.verdicts))
        self.versions.append(versions)


def config_of(
    folder: Path, staleness: int, iterations: int, **sections: dict[str, Any]
) -> RunConfig:
    """20 groups of 2 per iteration; scoring takes 10 ms in the middle, and one time in fifty more than 100 ms."""
    simulated = {"prefix_s": 0.002, "completion_s": 0.010, "completion_sigma": 1.2}
    return run_on_disk(
        folder,
        rollout={"engine": "simulated", "prefix_tokens": 2} | sections.pop("rollout", {}),
        scorer={"engine": "simulated", "max_new_tokens": 8},
        simulated=simulated | sections.pop("simulated", {}),
        algorithm={"groups_per_iteration": 20, "iterations": iterations, "max_staleness": staleness}
        | sections.pop("algorithm", {}),
        **sections,
    )


def run(
    config: RunConfig,
    before_batch: Callable[[Broker, int], None] = lambda *_: None,
    old_ess: float | None = None,
    trains_s: float = 0.0,
) -> Trained:
    """Train to the end with one rollout and two scorers.

    `before_batch` may hold the learner up, which reports `old_ess` after every iteration of so many seconds.
    """
    with serving(config) as broker:
        endpoint = endpoint_of(config)
        with workers(endpoint, config, ("rollout", "scorer", "scorer")):
            rank = Peer(endpoint, b"rank")
            try:
                may_cross = config.rollout.swap == "in_flight"
                return _learn(
                    rank,
                    lambda iteration: before_batch(broker, iteration),
                    may_cross,
                    old_ess,
                    trains_s,
                )
            finally:
                rank.close()


def _learn(
    rank: Peer,
    before_batch: Callable[[int], None],
    may_cross: bool,
    old_ess: float | None,
    trains_s: float,
) -> Trained:
    trained, iteration = Trained(), 0
    rank.join("rank")
    while True:
        rank.say(messages.Published(note(iteration)))
        rank.hear(messages.Accepted)
        before_batch(iteration)
        answer = next_batch(rank, iteration)
        if not isinstance(answer, messages.Batch):
            trained.end, trained.status = answer, status(rank)
            rank.say(messages.Stop("the run is finished"))
            rank.hear(messages.Accepted)
            rank.say(Goodbye("the run is finished"))
            return trained
        trained.take(answer, groups_of(rank, answer), may_cross)
        time.sleep(trains_s)
        rank.say(messages.IterationDone(iteration, iteration + 1, old_ess))
        rank.hear(messages.Accepted)
        iteration += 1


def next_batch(rank: Peer, iteration: int, patience_s: float = PATIENCE_S) -> messages.FromBroker:
    """Return the broker's answer once it has one."""
    waiting_for = ""
    for _ in range(int(patience_s)):
        rank.say(messages.GetBatch(iteration, 0, 1))
        while True:
            answer = rank.hear(messages.FromBroker)
            if isinstance(answer, messages.NotYet):
                waiting_for = answer.waiting_for
                break
            if isinstance(answer, messages.Batch | messages.RunOver | messages.CannotGoOn):
                return answer
    raise AssertionError(f"no batch {iteration} in {patience_s:g} s: waiting for {waiting_for}")


@contextmanager
def beside(*works: Callable[[threading.Event], None], end_s: float = 60.0) -> Iterator[None]:
    """Functions in threads of their own; the end of the block sets their event. Their errors fail the test."""
    stop, failures = threading.Event(), list[BaseException]()

    def guarded(work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(end_s)
    assert not failures and not any(thread.is_alive() for thread in threads), failures


def loop(
    address: Callable[[], Address],
    role: Literal["rollout", "scorer"],
    make: Callable[[Link], WorkLoop[Any]],
) -> Callable[[threading.Event], None]:
    """A worker's loop with a connection of its own, for `beside`."""

    def work(stop: threading.Event) -> None:
        link = Link(address, role)
        try:
            link.name = link.welcome().worker
            worker = make(link)
            worker.say_ready()
            worker.run(stop.is_set)
        finally:
            link.close("done")

    return work


def workers(
    endpoint: str, config: RunConfig, roles: tuple[Any, ...]
) -> AbstractContextManager[None]:
    """Worker loops, one thread each."""
    return beside(
        *(loop(lambda: address(endpoint), role, partial(_worker, role, config)) for role in roles)
    )


def _worker(role: str, config: RunConfig, link: Link) -> Rollout | Scorer:
    engine = SimulatedEngine(role, config.simulated, config.rows_per_job(role))
    if role == "rollout":
        return Rollout(
            config,
            link,
            engine,
            ByteRenderer(),
            WeightsAtHand(),
            config.adapter.model,  # type: ignore[arg-type]
        )
    digests = scorer_digests(config, config.model_of("scorer"))
    return Scorer(config, link, engine, ByteRenderer(), Comparison(), digests)  # type: ignore[arg-type]


def until_full(broker: Broker, iteration: int) -> None:
    """Wait until no more groups may be issued before this iteration is trained."""
    window = broker.ledger.window
    assert window.iterations is not None
    last = min(iteration + window.max_staleness + 1, window.iterations)
    full = window.batch_groups * (last - iteration)
    wait_until(lambda: broker.ledger.outstanding >= full, "a full window")
