"""Rows that join and leave: every token is the one that the row alone would have drawn, whatever ran beside it."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.embedded import continuous, row_cache
from prefixrl.common.engines.embedded.continuous import TransformersEngine, objection
from prefixrl.common.engines.embedded.drawing import masked, truncated
from prefixrl.common.engines.interface.base import Continuation, Job, JobResult, room_of, score_rows
from prefixrl.common.wire.messages.groups import Sampling
from support.models.engine_jobs import PROMPTS, finish, job, settings
from support.models.tiny_model import VOCABULARY, save_model

NUDGE = 1e-4
"""Rounding of cumulative probabilities and logits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), is_tied=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return loaded(folder)


def loaded(folder: Path) -> PreTrainedModel:
    result: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return result.eval()


def engine_of(folder: Path, seats: int = 64) -> TransformersEngine:
    return TransformersEngine(str(folder), "cpu", "float32", 1, seats=seats)


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return engine_of(folder)


def assert_rows_follow(model: PreTrainedModel, asked: Job, result: JobResult) -> None:
    """Every token is the draw of its own uniform from the model's own whole forward over the row alone."""
    assert len(result.rows) == len(asked.rows)
    for prompt, uniforms, row in zip(asked.rows, asked.uniforms, result.rows, strict=True):
        assert_row_follows(model, asked, prompt.tolist(), uniforms.tolist(), row)


def assert_row_follows(
    model: PreTrainedModel, asked: Job, prompt: list[int], uniforms: list[float], row: Continuation
) -> None:
    written = row.tokens.tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1].float()
    own = truncated(masked(logits, asked.masked_tokens), asked.sampling)
    table = torch.log_softmax(own / (asked.sampling.temperature or 1.0), dim=-1)
    assert row.logprobs == pytest.approx(
        table.gather(1, torch.tensor(written)[:, None])[:, 0].numpy(), abs=1e-4
    )
    for place, token in enumerate(written):
        if asked.sampling.temperature == 0.0:
            assert own[place, token] >= own[place].max() - NUDGE
            continue
        reached = table[place].double().exp().cumsum(0)
        before = float(reached[token - 1]) if token else 0.0
        assert before - NUDGE <= uniforms[place] <= float(reached[token]) + NUDGE
    stops = [place for place, token in enumerate(written) if token in asked.stop_tokens]
    assert stops in ([], [len(written) - 1])
    assert row.finish == ("eos" if stops else "length")
    assert stops or len(written) == asked.sampling.max_new_tokens


@dataclass(frozen=True)
class Arrival:
    step: int
    job: Job


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    max_new_tokens=st.integers(1, 9),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
)
TOKENS = st.integers(2, VOCABULARY - 1)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    results = []
    examples = draw(st.lists(TOKENS, max_size=8))
    for number in range(draw(st.integers(1, 6))):
        head = examples + draw(st.lists(TOKENS, min_size=1, max_size=14))
        tails = draw(st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=5))
        copies = draw(st.integers(1, 3))
        asked = job(
            f"job {number}",
            [head + tail for tail in tails for _ in range(copies)],
            draw(SAMPLINGS),
            stops=draw(st.frozensets(TOKENS, max_size=12)),
            masks=draw(st.sampled_from([frozenset[int](), frozenset({7, 8, 9})])),
            seed=draw(st.integers(0, 3)),
        )
        results.append(Arrival(draw(st.integers(0, 12)), asked))
    return sorted(results, key=lambda each: each.step)


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_whatever_joins_when_every_row_is_written_as_if_it_were_alone(
    folder: Path, model: PreTrainedModel, examples: int
) -> None:
    """The same weights installed in between drop all keys and values, and change nothing else.

    With few columns the blocks are made anew again and again while rows are in them.
    """

    @hypothesis.settings(max_examples=examples, deadline=None)
    @given(
        arrivals(),
        st.integers(1, 12),
        st.sets(st.integers(0, 15), max_size=2),
        st.sampled_from([4, 64]),
    )
    def check(coming: list[Arrival], seats: int, installs: set[int], columns: int) -> None:
        with mock.patch.object(row_cache, "LEAST_COLUMNS", columns):
            every_row_is_written_as_alone(
                shared_engine(folder, seats, columns), model, coming, seats, installs
            )

    check()


def every_row_is_written_as_alone(
    engine: TransformersEngine,
    model: PreTrainedModel,
    coming: list[Arrival],
    seats: int,
    installs: set[int],
) -> None:
    asked, results, step = {each.job.key: each.job for each in coming}, dict[str, JobResult](), 0
    left, tokens_before = list(coming), engine.tokens
    while len(results) < len(asked):
        while left and left[0].step <= step:
            engine.submit(left.pop(0).job)
        if step in installs:
            engine.install(snapshot_of(0, engine.weights()))
        results |= {result.key: result for result in engine.step(0.0)}
        assert sum(engine.rows_left(key) for key in asked) - engine.waiting_rows <= seats
        assert not any(engine.rows_left(key) for key in results)
        step += 1
        assert step < 500
    for key, result in results.items():
        assert_rows_follow(model, asked[key], result)
    written = sum(row.tokens.size for result in results.values() for row in result.rows)
    assert engine.tokens - tokens_before == written == engine.progress - tokens_before
    assert engine.step(0.0) == []


ENGINES: dict[tuple[Path, int], TransformersEngine] = {}


def shared_engine(folder: Path, seats: int, columns: int) -> TransformersEngine:
    """One engine for all examples of a kind: its cache has seen other rows before."""
    engine = ENGINES.get((folder, columns)) or ENGINES.setdefault(
        (folder, columns), engine_of(folder)
    )
    engine.seats = seats
    return engine


def sliding() -> PreTrainedConfig:
    return MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        initializer_range=0.3,
    )


def alternating() -> PreTrainedConfig:
    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.3,
    )


def learned_positions() -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        eos_token_id=1,
    )


@pytest.mark.parametrize("shape", [sliding, alternating, learned_positions])
def test_models_whose_layers_look_at_parts_or_know_positions_otherwise_are_right_too(
    tmp_path: Path, shape: "type[PreTrainedConfig]"
) -> None:
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(shape()).save_pretrained(tmp_path)
    assert objection(str(tmp_path)) == ""
    engine, model = engine_of(tmp_path, seats=5), loaded(tmp_path)
    question = [5, 9, 2, 44, 8, 17, 3]
    first = job("first", [[*question, 11 + each, 7] for each in range(4)], settings(0.0))
    second = job("second", [[4], [*range(30, 43)]], settings(0.9, 20))
    engine.submit(first)
    for _ in range(3):
        assert engine.step(0.0) == []
    done = finish(engine, second, already=["first"])
    assert_rows_follow(model, first, done["first"])
    assert_rows_follow(model, second, done["second"])


def test_greedy_rows_are_those_of_single_rows_to_the_token(
    folder: Path, engine: TransformersEngine
) -> None:
    rows = PROMPTS
    alone = [
        finish(engine, job("alone", [row], settings(0.0)))["alone"].rows[0].tokens.tolist()
        for row in rows
    ]
    engine.submit(job("early", rows[:2], settings(0.0)))
    engine.step(0.0)
    engine.step(0.0)
    done = finish(engine, job("late", rows[2:], settings(0.0)), already=["early"])
    assert [row.tokens.tolist() for key in ("early", "late") for row in done[key].rows] == alone


def test_a_large_join_is_cut_into_forwards_of_a_bounded_size(
    engine: TransformersEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 20)
    asked = job("a", [[3 + row, *range(4, 11)] for row in range(7)])
    engine.submit(asked)
    left = []
    while not (done := engine.step(0.0)):
        left.append(engine.waiting_rows)
    assert left[:2] == [5, 3], "8 tokens each: two rows per forward"
    assert_rows_follow(model, asked, done[0])


def test_many_logits_are_drawn_in_parts(
    engine: TransformersEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "DRAW_CELLS", 2 * VOCABULARY)
    asked = job("a", [[3 + row] for row in range(5)], settings(0.8, 6))
    assert_rows_follow(model, asked, finish(engine, asked)["a"])


def test_a_probe_is_scored_in_few_forwards_with_the_logprobs_of_row_by_row(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.Generator(np.random.PCG64(3))
    sizes = [(1, 3), (9, 6), (4, 6), (0, 5), (7, 1)]
    rows = [
        tuple(numbers.integers(2, VOCABULARY, size).astype(np.int32) for size in each)
        for each in sizes
    ]
    one_by_one = score_rows(engine.logprobs, rows)
    assert one_by_one.size == 3 + 6 + 6 + 4 + 1
    np.testing.assert_allclose(engine.score(rows), one_by_one, atol=1e-5)
    monkeypatch.setattr(continuous, "DRAW_CELLS", 2 * 15 * VOCABULARY)
    np.testing.assert_allclose(engine.score(rows), one_by_one, atol=1e-5)
    assert engine.score([]).size == 0


def test_a_row_that_waits_takes_the_seat_of_one_that_ends(folder: Path) -> None:
    engine = engine_of(folder, seats=2)
    assert (engine.seats, engine.room, engine.takes_runs) == (2, room_of(2), False)
    engine.submit(job("short", [[5]], settings(0.0, 2)))
    engine.submit(job("long", [[6]], settings(0.0, 30)))
    engine.submit(job("waits", [[7]], settings(0.0, 2)))
    assert engine.step(0.0) == [] and (engine.waiting_rows, engine.rows_left("waits")) == (1, 1)
    ended = [result.key for _ in range(3) for result in engine.step(0.0)]
    assert ended == ["short", "waits"] and engine.rows_left("long") == 1
    assert engine.rows_left("short") == engine.rows_left("unknown") == 0


def test_a_job_with_more_rows_than_seats_is_done_row_by_row(
    folder: Path, model: PreTrainedModel
) -> None:
    engine = engine_of(folder, seats=3)
    asked = job("a", [[3 + row] for row in range(8)], settings(0.7, 5))
    assert_rows_follow(model, asked, finish(engine, asked)["a"])


def test_only_a_job_of_which_no_row_has_begun_can_be_cancelled(folder: Path) -> None:
    engine = engine_of(folder, seats=3)
    engine.submit(job("a", [[5], [6]]))
    engine.submit(job("b", [[7], [8]]))
    engine.submit(job("c", [[9]]))
    engine.step(0.0)
    assert not engine.cancel("a") and not engine.cancel("b"), "one of its rows has a seat"
    assert engine.cancel("c") and not engine.cancel("c") and not engine.cancel("unknown")
    assert engine.waiting_rows == 1
    assert set(finish(engine, already=["a", "b"])) == {"a", "b"}


def test_a_few_newcomers_wait_a_few_steps_for_others_to_join_with(folder: Path) -> None:
    engine = engine_of(folder)
    engine.submit(job("many", [[3 + row] for row in range(12)], settings(0.0, 30)))
    engine.step(0.0)
    engine.submit(job("one", [[5]]))
    waits = [
        engine.waiting_rows for _ in range(continuous.JOIN_STEPS + 1) if engine.step(0.0) == []
    ]
    assert waits == [1] * continuous.JOIN_STEPS + [0]
    engine.submit(job("three", [[5], [6], [7]]))
    engine.step(0.0)
    engine.submit(job("four", [[5]]))
    engine.step(0.0)
    assert engine.waiting_rows == 0, "four of them are worth a forward beside thirteen"


def test_seats_are_busy_for_the_time_of_the_forwards_of_their_rows(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward takes a second on this clock: it is read at its beginning, in it, and at its end."""

    class Clock:
        now_s = 0.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now_s += 0.5
            return cls.now_s

    monkeypatch.setattr(continuous, "time", Clock)
    engine.submit(job("a", [[5], [6]], settings(0.0, 3)))
    busy = []
    while not engine.step(0.0):
        busy.append(engine.busy_row_s)
    assert busy == [1.0, 2.0] and engine.busy_row_s == 3.0


def test_what_the_rows_of_a_job_share_is_computed_once(
    engine: TransformersEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    forward = engine._model.forward

    def watched(**given: torch.Tensor) -> object:
        shapes.append((given["input_ids"].shape[0], given["input_ids"].shape[1]))
        return forward(**given)

    monkeypatch.setattr(engine._model, "forward", watched)
    question = [5, 9, 2, 44, 8, 17, 3]
    equal = job("equal", [question] * 6, settings(0.8, 4))
    written = finish(engine, equal)["equal"]
    assert_rows_follow(model, equal, written)
    assert shapes == [(1, 7), *((texts_after(written, tokens), 1) for tokens in (1, 2, 3))]
    assert 1 < texts_after(written, 1) < 6, "some of them have the same first token"
    shapes.clear()
    branching = job(
        "branching", [[*question, 20 + each // 2] for each in range(6)], settings(0.0, 3)
    )
    assert_rows_follow(model, branching, finish(engine, branching)["branching"])
    assert shapes == [(1, 7), (3, 1), (3, 1), (3, 1)], "equal texts go on alike at temperature 0"
    shapes.clear()
    apart = job("apart", [[20 + each, *question] for each in range(3)], settings(0.8, 1))
    assert_rows_follow(model, apart, finish(engine, apart)["apart"])
    assert shapes == [(3, 8)]
    several = [
        job(f"{number}", [[*question, 30 + number, 40]], settings(0.0, 1)) for number in range(3)
    ]
    for each, result in finish(engine, *several).items():
        assert_rows_follow(model, several[int(each)], result)
    assert shapes[1:] == [(1, 7), (3, 2)], "jobs with equal beginnings, as worked examples are"


def texts_after(written: JobResult, tokens: int) -> int:
    """Return the number of different beginnings of so many tokens."""
    return len({tuple(row.tokens[:tokens].tolist()) for row in written.rows})


def test_rows_go_on_with_weights_installed_in_between_and_newcomers_have_only_those(
    folder: Path,
) -> None:
    engine = engine_of(folder)
    old = {name: tensor.clone() for name, tensor in engine.weights().items()}
    generator = torch.Generator().manual_seed(1)
    new = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in old.items()
    }
    early = job("early", [[5, 9, 2], [7]], settings(0.7, 9))
    engine.submit(early)
    for _ in range(4):
        engine.step(0.0)
    engine.install(snapshot_of(1, new))
    late = job("late", [[11, 3, 3, 8]], settings(0.7, 9))
    done = finish(engine, late, already=["early"])
    assert {row.spans for row in done["early"].rows} == {((0, 4), (1, 5))}
    assert {row.spans for row in done["late"].rows} == {((1, 9),)}
    changed = loaded(folder)
    changed.load_state_dict(new, strict=False)
    assert_rows_follow(changed, late, done["late"])
    for prompt, uniforms, row in zip(early.rows, early.uniforms, done["early"].rows, strict=True):
        begun = np.concatenate([prompt, row.tokens[:4]])
        rest = replace(late, rows=(begun,), uniforms=uniforms[None, 4:], sampling=settings(0.7, 5))
        tail = Continuation(row.tokens[4:], row.logprobs[4:], row.finish, ())
        assert_rows_follow(changed, rest, JobResult("rest", (tail,), 0.0))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (MambaConfig(num_hidden_layers=1), "mamba: it keeps more of a text than keys and values"),
        (
            LlamaConfig(
                num_hidden_layers=1,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "llama: with dynamic positions a row would depend on the longest one beside it",
        ),
        (
            Llama4TextConfig(num_hidden_layers=1),
            "llama4_text: its layers have chunks or keys in common",
        ),
    ],
)
def test_a_model_whose_rows_cannot_join_is_named_with_the_reason(
    tmp_path: Path, shape: PreTrainedConfig, reason: str
) -> None:
    shape.save_pretrained(tmp_path)
    assert objection(str(tmp_path)) == reason
