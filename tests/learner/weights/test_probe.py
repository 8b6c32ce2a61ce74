"""The text of the probe: likely, long enough, the same at every start, and within every context."""

import numpy as np
import pytest
import torch

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import (
    logprobs,
    pack_tokens,
    probe_positions,
    probe_rows,
    token_ids,
)
from prefixrl.learner.data import problems
from prefixrl.learner.weights.probe import POSITIONS, make_probe, room_tokens
from prefixrl.learner.weights.publish import weights_note
from support.paths import EXAMPLE

CPU = torch.device("cpu")
ADAPTER = str(EXAMPLE / "adapter")


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(EXAMPLE / "run.toml")


@pytest.fixture(scope="module")
def questions(config: RunConfig) -> list[str]:
    return [each.question for each in problems.load(config.data.train, config.data)]


def test_a_probe_is_text_that_the_adapter_finds_likely_and_the_same_again(
    config: RunConfig, questions: list[str]
) -> None:
    rows = make_probe(config, questions, ADAPTER, CPU)
    assert sum(scored.size for _, scored in rows) >= POSITIONS
    engine = TransformersEngine(ADAPTER, "cpu", "float32", 1)
    random = np.random.default_rng(0)
    unlikely = [
        (given, random.integers(2, 40, scored.size).astype(np.int32)) for given, scored in rows
    ]
    assert engine.score(rows).mean() > engine.score(unlikely).mean() + 2.0
    again = make_probe(config, questions, ADAPTER, CPU)
    assert all(np.array_equal(one[1], other[1]) for one, other in zip(rows, again, strict=True))


def test_rows_fit_the_shortest_context(config: RunConfig, questions: list[str]) -> None:
    vllm = config.rollout.vllm.model_copy(update={"max_model_len": 40})
    short = config.model_copy(update={"rollout": config.rollout.model_copy(update={"vllm": vllm})})
    assert room_tokens(short, 512) == 39 and room_tokens(short, 30) == 29
    rows = make_probe(short, questions, ADAPTER, CPU)
    assert max(given.size + scored.size for given, scored in rows) <= 39
    assert sum(scored.size for _, scored in rows) >= POSITIONS


def test_a_note_brings_the_rows_to_the_engine() -> None:
    rows = [
        (np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32)),
        (np.arange(2, dtype=np.int32),) * 2,
    ]
    note = weights_note(3, "d", rows, np.zeros(6, np.float32))
    assert probe_positions(note) == 6
    back = probe_rows(token_ids(note.probe_tokens), note.probe_rows)
    assert [(a.tolist(), b.tolist()) for a, b in back] == [
        (a.tolist(), b.tolist()) for a, b in rows
    ]
    with pytest.raises(ValueError, match="a probe of 11 tokens with rows of 9"):
        probe_rows(token_ids(note.probe_tokens), ((4, 5),))
    whole = WeightsNote(0, "d", pack_tokens([1, 2, 3]), b"")
    assert probe_positions(whole) == 2 and probe_rows(np.arange(3, dtype=np.int32), ())[0][
        1
    ].tolist() == [1, 2]


def test_a_certain_token_that_rounds_above_certainty_can_be_announced() -> None:
    rows = [(np.arange(1, dtype=np.int32), np.arange(2, dtype=np.int32))]
    note = weights_note(3, "d", rows, np.asarray([2e-6, -1.0], np.float32))
    assert logprobs(note.probe_logprobs, 2).tolist() == [0.0, -1.0]
