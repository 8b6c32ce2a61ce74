"""The embedded engine on a tiny real model: texts, logprobs, stops, installation, drawing."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.base import Continuation, Job, JobResult
from prefixrl.common.engines.hf import TransformersEngine, draw, truncated
from prefixrl.common.errors import DataError
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages import Sampling
from support.tiny_model import VOCABULARY, save_model

TOKENS = 12
PROMPTS = ([5, 9, 2], [7], [11, 3, 3, 8, 40, 22], [60, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), is_tied=True)


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(str(folder), "cpu", "float32", 1)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.eval()
    return loaded


def job(
    key: str, rows: tuple[list[int], ...] = PROMPTS, *, temperature: float = 0.7, stops: frozenset[int] = frozenset()
) -> Job:
    return Job(
        key,
        tuple(np.asarray(row, dtype=np.int32) for row in rows),
        row_uniforms(3, "prefix", len(rows), TOKENS),
        Sampling(temperature=temperature, max_new_tokens=TOKENS),
        stops,
    )


def finish(engine: TransformersEngine, *jobs: Job, already: int = 0) -> dict[str, JobResult]:
    """Submit jobs and run until these and the `already` queued ones are done; nothing may be left over."""
    for each in jobs:
        engine.submit(each)
    done: dict[str, JobResult] = {}
    while len(done) < len(jobs) + already:
        done |= {result.key: result for result in engine.step(0.0)}
    assert engine.step(0.0) == []
    return done


def same(left: JobResult, right: JobResult) -> bool:
    return all(
        a.finish == b.finish and np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left.rows, right.rows, strict=True)
    )


def test_a_text_does_not_depend_on_other_jobs_nor_on_their_order(engine: TransformersEngine, folder: Path) -> None:
    alone = finish(engine, job("a"))["a"]
    other = job("b", ([1, 2], [30, 31, 32]), temperature=1.3)
    assert same(alone, finish(engine, other, job("a"))["a"])
    assert same(alone, finish(engine, job("a"), other)["a"])
    fresh = TransformersEngine(str(folder), "cpu", "float32", 1)
    fresh.submit(other)
    assert fresh.step(0.0) == []
    late = finish(fresh, job("a"), already=1)  # arrives while the other one runs
    assert list(late) == ["b", "a"] and same(alone, late["a"])


def test_only_a_job_that_has_not_started_can_be_cancelled(engine: TransformersEngine) -> None:
    engine.submit(job("a"))
    engine.submit(job("b"))
    engine.step(0.0)
    assert engine.cancel("b")
    assert not engine.cancel("b") and not engine.cancel("a") and not engine.cancel("unknown")
    assert list(finish(engine, already=1)) == ["a"]


def test_a_rows_ids_do_not_depend_on_the_rows_it_is_padded_with(engine: TransformersEngine) -> None:
    together = finish(engine, job("a"))["a"].rows
    whole = job("a")
    for index in range(len(PROMPTS)):
        row = replace(whole, rows=(whole.rows[index],), uniforms=whole.uniforms[index : index + 1])
        alone = finish(engine, row)["a"].rows[0]
        assert np.array_equal(alone.tokens, together[index].tokens)
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def test_positions_count_from_a_rows_first_real_token(tmp_path: Path) -> None:
    """Learned positions: unlike rotary ones they tell where the padding ends."""
    torch.manual_seed(3)
    shape = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=1,
    )
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), "cpu", "float32", 1)
    for prompt, row in zip(PROMPTS, finish(engine, job("a"))["a"].rows, strict=True):
        scored = engine.logprobs(np.asarray([*prompt, *row.tokens], dtype=np.int32), 0.7)
        assert row.logprobs == pytest.approx(scored[len(prompt) - 1 :], abs=1e-5)


def test_greedy_is_the_argmax_of_a_forward_without_a_cache(engine: TransformersEngine, model: PreTrainedModel) -> None:
    results = finish(engine, job("a", temperature=0.0))["a"].rows
    for prompt, row in zip(PROMPTS, results, strict=True):
        ids = list(prompt)
        for token, logprob in zip(row.tokens, row.logprobs, strict=True):
            with torch.no_grad():
                table = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert int(table.argmax()) == token
            assert table.max().item() == pytest.approx(float(logprob), abs=1e-5)
            ids.append(int(token))
        with torch.no_grad():
            generated = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert generated[0].tolist() == ids


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
def test_logprobs_are_those_of_a_fresh_forward_at_the_sampling_temperature(
    engine: TransformersEngine, model: PreTrainedModel, temperature: float
) -> None:
    results = finish(engine, job("a", temperature=temperature))["a"].rows
    for prompt, row in zip(PROMPTS, results, strict=True):
        ids = np.asarray([*prompt, *row.tokens.tolist()], dtype=np.int32)
        assert row.logprobs == pytest.approx(whole_forward(model, ids, temperature)[len(prompt) - 1 :], abs=1e-5)
        scored = engine.logprobs(ids, temperature)
        assert scored.shape == (len(ids) - 1,)
        assert scored == pytest.approx(whole_forward(model, ids, temperature), abs=1e-5)


def whole_forward(model: PreTrainedModel, ids: NDArray[np.int32], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    table = torch.log(torch.softmax(logits / temperature, dim=-1))
    return [table[t - 1, int(ids[t])].item() for t in range(1, len(ids))]


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_a_bfloat16_engine_makes_logits_of_the_asked_type_and_keeps_its_weights(folder: Path, head_dtype: str) -> None:
    engine = TransformersEngine(str(folder), "cpu", "bfloat16", 1, head_dtype)
    tokens = np.asarray([5, 9, 2, 44, 8, 17], dtype=np.int32)
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden, weight = twin.model(torch.tensor(tokens[None].tolist())).last_hidden_state[0], twin.lm_head.weight
        logits = hidden.float() @ weight.float().T if head_dtype == "float32" else (hidden @ weight.T).float()
    table = torch.log_softmax(logits[:-1] / 0.7, dim=-1)
    expected = table.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(engine.logprobs(tokens, 0.7), expected.numpy(), atol=1e-5)
    assert {name: each.dtype for name, each in engine.weights().items()} == {
        name: torch.bfloat16 for name, _ in twin.named_parameters()
    }


def test_a_stop_token_ends_its_row_and_is_the_rows_last_token(engine: TransformersEngine) -> None:
    free = finish(engine, job("a"))["a"].rows
    stops = frozenset({int(free[0].tokens[4]), int(free[2].tokens[1])})
    stopped = finish(engine, job("a", stops=stops))["a"].rows
    for before, after in zip(free, stopped, strict=True):
        assert_cut_at_first_stop(before, after, stops)
    assert {row.finish for row in stopped} >= {"eos"}


def assert_cut_at_first_stop(before: Continuation, after: Continuation, stops: frozenset[int]) -> None:
    ids = before.tokens.tolist()
    ends = [place for place, token in enumerate(ids) if token in stops]
    expected = ids[: ends[0] + 1] if ends else ids
    assert after.tokens.tolist() == expected
    assert after.finish == ("eos" if ends else "length")
    assert np.array_equal(after.logprobs, before.logprobs[: len(expected)])


def test_a_job_ends_when_its_last_row_does(engine: TransformersEngine) -> None:
    first = finish(engine, job("a", ([5, 9],)))["a"].rows[0].tokens
    before = engine.progress
    stopped = finish(engine, job("a", ([5, 9],), stops=frozenset({int(first[0])})))["a"].rows[0]
    assert (stopped.tokens.tolist(), stopped.finish) == ([int(first[0])], "eos")
    assert engine.progress == before + 1


def test_a_hostile_generation_config_changes_nothing(engine: TransformersEngine, tmp_path: Path) -> None:
    plain = finish(engine, job("a"))["a"]
    greedy = finish(engine, job("a", temperature=0.0))["a"]
    folder = save_model(tmp_path / "hostile", is_tied=True)
    hostile = {
        "do_sample": True,
        "temperature": 0.05,
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": plain.rows[0].tokens.tolist(),
        "forced_eos_token_id": 1,
        "eos_token_id": plain.rows[0].tokens[:1].tolist(),
        "max_new_tokens": 2,
    }
    (folder / "generation_config.json").write_text(json.dumps(hostile), encoding="utf-8")
    misled = TransformersEngine(str(folder), "cpu", "float32", 1)
    assert same(plain, finish(misled, job("a"))["a"])
    assert same(greedy, finish(misled, job("a", temperature=0.0))["a"])


def test_weights_that_would_have_to_be_unpickled_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pickled is no model transformers can load from safet"):
        TransformersEngine(str(folder), "cpu", "float32", 1)


def test_installing_replaces_every_weight_bit_for_bit(engine: TransformersEngine) -> None:
    before = finish(engine, job("a"))["a"]
    generator = torch.Generator().manual_seed(1)
    given = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in engine.weights().items()
    }
    old = {name: tensor.clone() for name, tensor in engine.weights().items()}
    assert "lm_head.weight" not in given, "tied weights stand there once"
    engine.install(snapshot_of(1, given))
    assert all(torch.equal(engine.weights()[name], tensor) for name, tensor in given.items())
    assert not same(before, finish(engine, job("a"))["a"])
    engine.install(snapshot_of(1, old))
    assert same(before, finish(engine, job("a"))["a"])


def test_installed_weights_are_copied_not_shared(engine: TransformersEngine) -> None:
    given = snapshot_of(1, engine.weights())
    engine.install(given)
    before = finish(engine, job("a"))["a"]
    for tensor in given.tensors.values():
        tensor.zero_()
    assert same(before, finish(engine, job("a"))["a"])


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine: TransformersEngine) -> None:
    before = {name: tensor.clone() for name, tensor in engine.weights().items()}
    changed = {name: tensor + 1.0 for name, tensor in before.items()}
    name = "model.norm.weight"
    missing = {key: tensor for key, tensor in changed.items() if key != name}
    for wrong, message in (
        (missing, "differ in names.*model.norm.weight"),
        (changed | {"model.extra": torch.zeros(1)}, "differ in names.*model.extra"),
        (changed | {name: torch.zeros(3)}, r"model.norm.weight has shape \(3,\).* is \(16,\)"),
        (changed | {name: changed[name].bfloat16()}, r"model.norm.weight has dtype torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.install(snapshot_of(1, wrong))
        assert all(torch.equal(engine.weights()[key], old) for key, old in before.items())


# --- drawing --------------------------------------------------------------------------------------------------------


def inverse_cumulative(logits: list[float], temperature: float, uniform: float) -> int:
    """The first token whose cumulative probability is above the draw, token by token."""
    weights = [np.exp((value - max(logits)) / temperature) for value in logits]
    total, reached = sum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight / total
        if reached > uniform:
            return token
    return len(logits) - 1


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.floats(0.25, 3.0),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_draw_inverts_the_cumulative_distribution(logits: list[float], temperature: float, uniform: float) -> None:
    tokens, logprobs = draw(torch.tensor([logits]), temperature, np.array([uniform]))
    slow = {
        inverse_cumulative(logits, temperature, min(max(uniform + nudge, 0.0), 1.0)) for nudge in (-1e-6, 0.0, 1e-6)
    }
    assert int(tokens[0]) in slow
    table = torch.log_softmax(torch.tensor(logits, dtype=torch.float64) / temperature, dim=0)
    assert float(logprobs[0]) == pytest.approx(table[int(tokens[0])].item(), abs=1e-4)
    assert float(logprobs[0]) <= 0.0


def test_many_draws_follow_the_distribution() -> None:
    logits, temperature, draws = [1.0, -2.0, 0.3, 2.0, -0.5], 0.8, 20_000
    uniforms = np.random.Generator(np.random.PCG64(8)).random(draws)
    tokens, _ = draw(torch.tensor([logits]).expand(draws, -1), temperature, uniforms)
    expected = draws * torch.softmax(torch.tensor(logits) / temperature, dim=0).numpy()
    counts = np.bincount(tokens, minlength=len(logits))
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: 1 in 1000


def test_rows_are_drawn_with_their_own_uniforms() -> None:
    tokens, _ = draw(torch.zeros(4, 4), 1.0, np.array([0.9, 0.6, 0.3, 0.1]))
    assert tokens.tolist() == [3, 2, 1, 0]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    almost_one = np.nextafter(1.0, 0.0)
    tokens, logprobs = draw(logits, 1.0, np.array([0.0, 0.499, 0.5, almost_one]))
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs == pytest.approx(np.log(0.5))


def test_greedy_takes_the_most_likely_token_whatever_the_draw() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32).flip(0).expand(3, -1)
    tokens, logprobs = draw(logits, 0.0, np.array([0.0, 0.5, 0.999]))
    assert tokens.tolist() == [0, 0, 0]
    assert (logprobs < 0).all()


@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=10, unique=True),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.05, 0.4]),
)
def test_truncation_leaves_out_what_its_definitions_say(
    quarters: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [each / 4 for each in quarters]
    sampling = Sampling(temperature=temperature, max_new_tokens=8, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = truncated(torch.tensor([logits]), sampling)[0]
    weights = [math.exp(each / temperature) for each in logits]
    left = [place for place in range(len(logits)) if weights[place] >= min_p * max(weights)]
    left.sort(key=lambda place: -weights[place])
    left = left[: top_k or None]
    nucleus, mass, whole = [], 0.0, sum(weights[place] for place in left)
    for place in left:
        if mass < top_p * whole:
            nucleus.append(place)
        mass += weights[place]
    assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == set(nucleus)
    assert kept[nucleus].tolist() == pytest.approx([logits[place] for place in nucleus], abs=1e-5)


def test_without_truncation_and_when_greedy_logits_stay_as_they_are() -> None:
    logits = torch.randn(2, 5)
    assert truncated(logits, Sampling(temperature=0.7, max_new_tokens=8)) is logits
    assert truncated(logits, Sampling(temperature=0.0, max_new_tokens=8, top_k=1)) is logits
