"""A broker of a run of weeks: after four times as many iterations it holds no more."""

import gc
import logging
import os
import sys
from itertools import count
from pathlib import Path

import pytest

from prefixrl.common.journal import records
from prefixrl.common.wire.messages import learner, worker
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker import peers, status
from prefixrl.learner.broker.groups import evaluations
from prefixrl.learner.broker.workers import identity, versions
from prefixrl.learner.data import order
from security.socketless_broker import SocketlessBroker
from support.fakes import ready, run_on_disk

KEPT, ITERATIONS = 8, 100
"""Things kept of each kind, for the test; iterations before the first count."""
BOUNDS = (
    (identity, "VERSIONS_KEPT"),
    (evaluations, "VERSIONS_KEPT"),
    (versions, "PROBES_KEPT"),
    (peers, "MOST_PEERS"),
    (order, "PERMUTATIONS_KEPT"),
    (records, "MOST_CAUSES"),
)


class Learner:
    """A learner, and as its workers processes that each work for one iteration, about a broker without a socket."""

    def __init__(self, folder: Path) -> None:
        algorithm = {"iterations": 10**6, "max_staleness": 0}
        sections = {"broker": {"max_failure_share": 1.0, "attempts": 1, "requeues": 10**6}}
        self._config = run_on_disk(folder, problems=6, algorithm=algorithm, **sections)
        self._fake = SocketlessBroker(self._config)
        self.broker, self._numbers = self._fake.broker, count()

    def _say(self, peer: str, message: learner.ToBroker) -> None:
        role: Role = (
            "rank" if peer == "rank" else "operator" if peer.startswith("operator") else "rollout"
        )
        self._fake.handle(peer.encode(), role, message)

    def _join(self, peer: str, role: Role) -> None:
        self._say(
            peer,
            worker.Hello(
                protocol=PROTOCOL, role=role, incarnation=f"i{next(self._numbers)}", host="h", pid=1
            ),
        )
        if role in ("rollout", "scorer"):
            self._say(peer, ready(self._config, role, 8, self.broker.ledger.completed))

    def train(self, iteration: int) -> None:
        """Enrol workers, evaluate, train and publish; a rollout leaves with its tasks, the workers when all is done."""
        name, again = f"e{iteration}", tuple(range(4))
        self._join("rank", "rank")  # more peers came than are kept
        self._join(f"operator{iteration}", "operator")
        self._say(f"operator{iteration}", learner.GetStatus())
        prompts, prefixes = (
            (self.broker.dispatcher._prompts.prompt(0),),
            self._config.rollout_sampling(),
        )
        self._say(
            "rank",
            learner.Evaluate(
                name=name,
                version=iteration,
                prefix_tokens=b"",
                prompts=prompts,
                prefix_sampling=prefixes,
                completion_sampling=self._config.scorer_sampling(),
            ),
        )
        self._join(f"leaver{iteration}", "rollout")
        self._fake.turn()
        self._say(f"leaver{iteration}", worker.Goodbye("it leaves its tasks"))
        cause = f"a length of {iteration}"
        self.broker.ledger.expire(next(iter(self.broker.ledger.live())).seq, cause, {cause: 1})
        workers: tuple[Role, ...] = ("rollout", "scorer")
        for role in workers:
            self._join(f"{role}{iteration}", role)
        self._say("rank", learner.GetBatch(iteration, 0, 1))
        while not self._fake.counts.pop("answered Batch", 0):
            self._fake.turn()
            for role in workers:
                results = self._fake.results[f"{role}{iteration}".encode()]
                while results:
                    self._say(f"{role}{iteration}", results.pop())
        for message in (
            learner.GetGroups(iteration, again),
            learner.GetEvaluation(name),
            learner.Forget(name),
            learner.IterationDone(iteration, 1),
        ):
            self._say("rank", message)
        digest, probe = f"d{iteration + 1}", (pack_tokens([1, 2, 3]), pack_logprobs([-1.0, -2.0]))
        self._say("rank", learner.Published(WeightsNote(iteration + 1, digest, *probe)))
        for role in workers:
            self._say(
                f"{role}{iteration}",
                worker.Heartbeat(progress=iteration, busy_row_s=1.0, leases=(), state="idle"),
            )
            self._say(f"{role}{iteration}", worker.Goodbye("its time is over"))
        self._fake.turn()
        self._fake.results.clear()
        assert not self.broker.ledger.outstanding and not self.broker.dispatcher.evaluations.runs

    def blocks(self, until: int) -> int:
        """Train up to an iteration; return how many blocks of memory the process holds then."""
        for iteration in range(self.broker.ledger.completed, until):
            self.train(iteration)
        gc.collect()
        return sys.getallocatedblocks()


def test_the_broker_holds_no_more_after_four_times_as_many_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "prefixrl")  # pytest keeps every line
    for module, name in BOUNDS:
        monkeypatch.setattr(module, name, KEPT)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)  # it takes most of the time
    monkeypatch.setattr(status, "memory_now", lambda: None)
    run = Learner(tmp_path)
    before = run.blocks(ITERATIONS)
    after = run.blocks(4 * ITERATIONS)
    run.broker.journal.close()
    # One block per iteration would be 300; dictionaries and pools of the interpreter fill up by about 100.
    assert after - before < 2 * ITERATIONS, (
        f"{before} blocks, {after} after four times as many iterations"
    )
