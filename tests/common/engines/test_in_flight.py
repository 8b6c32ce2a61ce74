"""Weights installed in the middle of a job: every token is of the version its span says, and of nothing older."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.workers.simulated import SimulatedConfig
from prefixrl.common.engines import simulated as engine_simulated
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Continuation, Job, spans_of
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from support.fakes import SteppedClock
from support.models import versioned
from support.models.engine_jobs import EmbeddedEngines

TOKENS = 30
PROMPTS = tuple(
    np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"1 + 1 =", b"2", b"10 - 3")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return versioned.save(tmp_path_factory.mktemp("versioned"))


def job(stops: frozenset[int] = frozenset()) -> Job:
    draws = row_uniforms(3, "prefix", len(PROMPTS), TOKENS)
    return Job("a", PROMPTS, draws, Sampling(temperature=1.0, max_new_tokens=TOKENS), stops)


@pytest.fixture(params=[TransformersEngine, FixedRowsEngine], ids=["continuous", "fixed rows"])
def engine(request: pytest.FixtureRequest, folder: Path) -> EmbeddedEngines:
    loaded: EmbeddedEngines = request.param(str(folder), "cpu", "float32", 1)
    return loaded


def crossing(
    engine: EmbeddedEngines, installs: dict[int, int], stops: frozenset[int] = frozenset()
) -> tuple[tuple[Continuation, ...], dict[int, dict[str, torch.Tensor]]]:
    """Rows of a job in which version `installs[step]` is installed before that decoding step.

    The weights by version.
    """
    initial = {name: tensor.clone() for name, tensor in engine.weights().items()}
    weights = {0: initial} | {each: versioned.version(initial, each) for each in installs.values()}
    engine.submit(job(stops))
    for step in range(TOKENS):
        if step in installs:
            engine.install(snapshot_of(installs[step], weights[installs[step]]))
        if done := engine.step(0.0):
            return done[0].rows, weights
    raise AssertionError("the job did not end")


def test_every_token_is_of_the_version_of_its_span(engine: EmbeddedEngines) -> None:
    rows, _ = crossing(engine, {7: 1, 8: 2, 20: 5})
    for row in rows:
        assert row.spans == ((0, 7), (1, 1), (2, 12), (5, 10))
        assert spans_of(versioned.written_by(row.tokens).tolist()) == row.spans


def test_logprobs_are_those_of_the_version_that_sampled_each_token_with_nothing_left_of_the_old_one(
    engine: EmbeddedEngines, folder: Path
) -> None:
    rows, weights = crossing(engine, {7: 1, 20: 5})
    for prompt, row in zip(PROMPTS, rows, strict=True):
        place, text = 0, np.concatenate([prompt, row.tokens])
        for version, size in row.spans:
            whole = versioned.logprobs(folder, weights[version], text, 1.0)[len(prompt) - 1 :]
            gap = np.abs(whole - row.logprobs)[place : place + size]
            assert gap.max() < 1e-4
            place += size
        assert row.logprobs.std() > 0.1, "there is something to compare"


def test_a_row_that_ended_before_the_swap_is_of_one_version(engine: EmbeddedEngines) -> None:
    (*plain,) = crossing(engine, {})[0]
    ended = int(plain[0].tokens[5])
    rows, _ = crossing(engine, {20: 1}, frozenset({ended}))
    short = [row for row in rows if row.tokens.size < 20]
    assert short and all(row.spans == ((0, row.tokens.size),) for row in short)


def test_weights_installed_before_the_first_token_write_all_of_them(
    engine: EmbeddedEngines,
) -> None:
    rows, _ = crossing(engine, {0: 3})
    assert {row.spans for row in rows} == {((3, TOKENS),)}


def test_weights_no_token_was_sampled_with_have_no_span(engine: EmbeddedEngines) -> None:
    initial = {name: tensor.clone() for name, tensor in engine.weights().items()}
    engine.submit(job())
    for _ in range(4):
        engine.step(0.0)
    for version in (1, 2):
        engine.install(snapshot_of(version, versioned.version(initial, version)))
    while not (done := engine.step(0.0)):
        pass
    assert {row.spans for row in done[0].rows} == {((0, 4), (2, TOKENS - 4))}


def test_a_simulated_rollout_writes_the_version_it_holds_at_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_simulated, "time", SteppedClock())
    engine = SimulatedEngine("rollout", SimulatedConfig(prefix_s=0.2))
    engine.submit(job())
    for version in (1, 2):
        assert engine.step(0.02) == []
        engine.install(snapshot_of(version, {"weight": torch.zeros(4)}))
    done = []
    while not done:
        done = engine.step(0.05)
    for row in done[0].rows:
        assert row.tokens.size == TOKENS
        assert spans_of(row.tokens.tolist()) == row.spans
        assert row.spans == ((0, 3), (1, 3), (2, TOKENS - 6))
