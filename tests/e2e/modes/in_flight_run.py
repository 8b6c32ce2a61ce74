"""A direct run whose updates arrive in the middle of answers: real sockets, broker, weight server and rollout loops.

The model is `versioned.py`'s, so what wrote a token stands in the token. Two rollouts sample: one as fast as it can,
one that stops at given places until the next version is there (`hold`). The learner trains nothing: it takes a batch,
publishes the next version, and so on."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.snapshots import snapshot_of
from e2e.simulated_run import beside, loop, next_batch
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.interface.base import AdapterEngine
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Accepted, Batch, IterationDone, Published
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import ScoreTask
from prefixrl.common.wire.packing import (
    digests,
    logprobs,
    pack_logprobs,
    pack_tokens,
    token_ids,
    token_versions,
)
from prefixrl.common.worker.link import Link
from prefixrl.learner.models.batch import iteration_data
from prefixrl.rollout.loop import Rollout
from prefixrl.rollout.weights import Fetcher
from support import fakes
from support.keys import source
from support.models import versioned

STALENESS = 3
PATIENCE_S = 240.0
PROBE = np.arange(2, 34, dtype=np.int32)


@dataclass
class Trained:
    """The groups that a learner received."""

    groups: list[ScoredGroup] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    """Age of the oldest token of each group, read from the tokens."""


@dataclass
class World:
    """A learner with its weights, and what it was given."""

    config: RunConfig
    model: Path
    reference: TransformersEngine
    weights: list[versioned.Tensors]
    trained: Trained = field(default_factory=Trained)

    def note(self, version: int) -> WeightsNote:
        """Publish a version's files; what is to be announced."""
        manifest = describe(version, self.weights[version])
        write_snapshot(Path(self.config.directory) / "weights", manifest, self.weights[version])
        self.reference.install(snapshot_of(version, self.weights[version]))
        probe = self.reference.logprobs(PROBE, self.config.rollout.temperature)
        return WeightsNote(version, manifest.digest, pack_tokens(PROBE), pack_logprobs(probe))


def world(folder: Path, answer_tokens: int, iterations: int) -> World:
    """One group of two answers per iteration, one per task; the window is three versions wide."""
    config = fakes.run_on_disk(
        folder,
        mode="direct",
        rollout={
            **{"engine": "auto", "answer_tokens": answer_tokens, "temperature": 1.0},
            **{"swap": "in_flight", "groups_per_task": 1, "max_prompt_tokens": 32},
            "vllm": {"max_num_seqs": 2},
        },
        algorithm={
            **{"groups_per_iteration": 1, "iterations": iterations, "max_staleness": STALENESS}
        },
        learner={"dtype": "float32"},
        broker={"heartbeat_s": 1.0, "silence_s": 200.0},
    )
    model = versioned.save(Path(config.adapter.model))
    reference = TransformersEngine(str(model), "cpu", "float32", 1)
    initial = {name: tensor.clone() for name, tensor in reference.weights().items()}
    later = [versioned.version(initial, version) for version in range(1, iterations + 1)]
    return World(config, model, reference, [initial, *later])


def run(here: World, slow: AdapterEngine, hold: Callable[[int], None]) -> Trained:
    """Train to the end; `slow` is the slow rollout's engine, and `hold` is called before each batch is asked for.

    The slow rollout has its first task, at version 0, before the fast one joins.
    """
    fast = TransformersEngine(str(here.model), "cpu", "float32", 1)
    weights = Path(here.config.directory) / "weights"
    with fakes.serving(here.config) as broker, fakes.weight_server(weights) as (source, _):
        rank = fakes.Peer(fakes.endpoint_of(here.config), b"rank")
        try:
            rank.join("rank")
            _publish(rank, here.note(0))
            with _scoring(here.config), _rollout(here.config, slow, source):
                fakes.wait_until(
                    lambda: broker.ledger.states().get("sampling"), "the slow task", 120.0
                )
                with _rollout(here.config, fast, source):
                    for iteration in range(len(here.weights) - 1):
                        hold(iteration)
                        _train(here, rank, iteration)
        finally:
            rank.close()
    return here.trained


def _train(here: World, rank: fakes.Peer, iteration: int) -> None:
    batch = next_batch(rank, iteration, PATIENCE_S)
    assert isinstance(batch, Batch)
    groups = fakes.groups_of(rank, batch)
    for group in groups:
        for row in group.prefixes.rows:
            written_by = versioned.written_by(token_ids(row.tokens))
            assert np.array_equal(token_versions(row), written_by)
            assert group.version <= written_by.min()
        for version, digest in digests([group.prefixes]):
            assert digest == describe(version, here.weights[version]).digest
    for sample in iteration_data(batch, dict(enumerate(groups))).samples.values():
        assert np.array_equal(sample.versions, versioned.written_by(sample.tokens))
        here.trained.ages.append(iteration - int(versioned.written_by(sample.tokens).min()))
    here.trained.groups += groups
    rank.say(IterationDone(iteration, iteration + 1))
    rank.hear(Accepted)
    _publish(rank, here.note(iteration + 1))


def _publish(rank: fakes.Peer, note: WeightsNote) -> None:
    rank.say(Published(note))
    rank.hear(Accepted)


def _scoring(config: RunConfig) -> AbstractContextManager[None]:
    def work(stop: threading.Event) -> None:
        with fakes.peers(fakes.endpoint_of(config), "scorer") as (scorer,):
            scorer.ready(config, "scorer")
            while not stop.is_set():
                received = scorer.client.receive(0.05)
                if received is not None and isinstance(received[0], ScoreTask):
                    scorer.say(fakes.scored(received[0]))

    return beside(work)


def _rollout(
    config: RunConfig, engine: AdapterEngine, weights: str
) -> AbstractContextManager[None]:
    def make(link: Link) -> Rollout:
        return Rollout(
            config, link, engine, ByteRenderer(), Fetcher(source(weights)), config.adapter.model
        )

    return beside(loop(lambda: fakes.address_of(config), "rollout", make))


def largest_gap(here: World) -> float:
    """Largest gap between the logprobs of trained tokens as sampled and as the version in their span gives them."""
    gaps = []
    for group in here.trained.groups:
        prompt = token_ids(group.prefixes.prompt_tokens)
        for row in group.prefixes.rows:
            tokens, place = token_ids(row.tokens), 0
            sampled = logprobs(row.logprobs, tokens.size)
            for span in row.spans:
                text = np.concatenate([prompt, tokens])
                expected = versioned.logprobs(here.model, here.weights[span.version], text, 1.0)
                part = slice(place, place + span.tokens)
                gaps.append(np.abs(expected[prompt.size - 1 :][part] - sampled[part]).max())
                place += span.tokens
    return float(max(gaps))
