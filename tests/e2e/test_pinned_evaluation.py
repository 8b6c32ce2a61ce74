"""Evaluations in training are of one version, proved from what the engines wrote, whatever is published and killed
meanwhile.

A real broker, real rollout loops that write their version into every token, scorers that are processes and die by
SIGKILL."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from e2e.simulated_run import next_batch, note, until_full, weights, workers
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.groups import Prompt, ScoredGroup
from prefixrl.common.wire.messages.learner import (
    Accepted,
    Batch,
    Evaluate,
    EvaluationProgress,
    GetEvaluation,
    IterationDone,
    Published,
)
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.broker.server import Broker
from support.fakes import Peer, end, endpoint_of, peers, run_on_disk, serving, wait_until

ITERATIONS, EVERY, PROBLEMS = 12, 3, 40
PROMPTS = tuple(Prompt(f"held-out-{i}", f"{i} + 1 =", str(i + 1)) for i in range(PROBLEMS))

pytestmark = [pytest.mark.timeout(240), pytest.mark.nightly]


def config_of(folder: Path) -> RunConfig:
    return run_on_disk(
        folder,
        rollout={"engine": "simulated", "prefix_tokens": 2},
        scorer={"engine": "simulated", "max_new_tokens": 8},
        simulated={"prefix_s": 0.05, "completion_s": 0.05, "accuracy": 1.0},
        algorithm={"iterations": ITERATIONS, "max_staleness": 4},
        broker={"heartbeat_s": 0.5, "silence_s": 6.0},
    )


@contextmanager
def scorer(config: RunConfig) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "prefixrl.scorer", "--run", config.directory]
    child = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield child
    finally:
        end(child)


def evaluation(rank: Peer, config: RunConfig, version: int) -> Evaluate:
    return Evaluate(
        name=f"adapter@{version}",
        version=version,
        prefix_tokens=b"",
        prompts=PROMPTS,
        prefix_sampling=config.rollout_sampling(0.0),
        completion_sampling=config.scorer_sampling(0.0),
    )


def judged(rank: Peer, version: int) -> list[ScoredGroup]:
    """The groups of a finished evaluation."""

    def finished() -> list[bytes]:
        rank.say(GetEvaluation(f"adapter@{version}"))
        progress, payload = rank.hear_with_payload(EvaluationProgress)
        assert progress.failed == 0
        return payload if progress.judged == progress.total else []

    payload = wait_until(finished, f"the evaluation of version {version}", timeout_s=90.0)
    decoder = msgspec.msgpack.Decoder(ScoredGroup)
    return [decoder.decode(frame) for frame in payload]


def until_ready(broker: Broker, iteration: int) -> None:
    """Wait for as many scored groups as the window may hold."""
    until_full(broker, iteration)
    wait_until(lambda: set(broker.ledger.states()) == {"scored"}, "a window of scored groups", 90.0)


def test_every_answer_is_of_the_pinned_version_although_each_iteration_publishes_and_scorers_die(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    with serving(config) as broker:
        endpoint = endpoint_of(config)
        with (
            workers(endpoint, config, ("rollout", "rollout")),
            scorer(config) as first,
            scorer(config),
            scorer(config) as third,
            peers(endpoint, "rank") as (rank,),
        ):
            rank.join("rank")
            doomed = {EVERY: first, 2 * EVERY: third}
            for iteration in range(ITERATIONS):
                if iteration % EVERY == 0:
                    rank.say(evaluation(rank, config, iteration))
                    rank.hear(Accepted)
                rank.say(Published(note(iteration)))
                rank.hear(Accepted)
                if iteration % 5 == 0:
                    # Then several versions follow each other faster than a rollout drains: it would skip some.
                    until_ready(broker, iteration)
                answer = next_batch(rank, iteration)
                assert isinstance(answer, Batch)
                if iteration in doomed:
                    doomed[iteration].kill()
                rank.say(IterationDone(iteration, iteration + 1))
                rank.hear(Accepted)
            for version in range(0, ITERATIONS, EVERY):
                groups = judged(rank, version)
                assert [group.prefixes.prompt for group in groups] == list(PROMPTS)
                written = {
                    int(token)
                    for group in groups
                    for token in token_ids(group.prefixes.rows[0].tokens)
                }
                assert written == {version}, "mixed versions"
                assert {group.version for group in groups} == {version}
                assert {group.weights_digest for group in groups} == {
                    weights(version).manifest.digest
                }
                assert all(group.verdicts[0].reward == 1.0 for group in groups)
