"""The common part of both embedded engines, on tiny real models: texts, logprobs, stops, installation."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Continuation
from prefixrl.common.errors import UserError
from support.models.engine_jobs import PROMPTS, TOKENS, EmbeddedEngines, finish, job, same, settings
from support.models.tiny_model import VOCABULARY, save_model

KINDS = {"continuous": TransformersEngine, "fixed rows": FixedRowsEngine}
Loader = Callable[..., EmbeddedEngines]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def load(request: pytest.FixtureRequest) -> Loader:
    """Load a folder's model."""

    def loaded(folder: Path, dtype: str = "float32", head_dtype: str = "model") -> EmbeddedEngines:
        engine: EmbeddedEngines = request.param(str(folder), "cpu", dtype, 1, head_dtype)
        return engine

    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), is_tied=True)


@pytest.fixture
def engine(folder: Path, load: Loader) -> EmbeddedEngines:
    return load(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.eval()
    return loaded


def test_a_rows_ids_do_not_depend_on_the_rows_it_is_padded_with(engine: EmbeddedEngines) -> None:
    together = finish(engine, job("a"))["a"].rows
    whole = job("a")
    for index in range(len(PROMPTS)):
        row = replace(whole, rows=(whole.rows[index],), uniforms=whole.uniforms[index : index + 1])
        alone = finish(engine, row)["a"].rows[0]
        assert np.array_equal(alone.tokens, together[index].tokens)
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def with_positions(folder: Path, positions: int) -> Path:
    """Save a model with learned positions."""
    torch.manual_seed(3)
    shape = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=positions,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=1,
    )
    GPT2LMHeadModel(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_rotary", [False, True])
def test_a_row_ends_where_its_model_has_no_more_positions(
    is_rotary: bool, tmp_path: Path, load: Loader
) -> None:
    of = (
        (lambda folder, most: save_model(folder, max_position_embeddings=most))
        if is_rotary
        else with_positions
    )
    prompts = [[5, 9, 2, 44], [7] * 11, [3, 4]]
    asked = job("a", prompts, settings(0.9, 40))
    short = finish(load(of(tmp_path / "short", 12)), asked)["a"].rows
    long = finish(load(of(tmp_path / "long", 64)), asked)["a"].rows
    for prompt, row, longer in zip(prompts, short, long, strict=True):
        assert (
            row.finish == "length"
            and len(prompt) + row.tokens.size == 12
            and len(longer.tokens) == 40
        )
    engine = load(tmp_path / "short")
    engine.submit(replace(asked, key="b"))
    with pytest.raises(
        UserError, match="a row of 12 tokens leaves no room in the 12 positions of the model"
    ):
        engine.submit(job("c", [[3] * 12]))


def test_positions_count_from_a_rows_first_real_token(tmp_path: Path, load: Loader) -> None:
    """Learned positions: unlike rotary ones they tell where the padding ends."""
    engine = load(with_positions(tmp_path, 32))
    for prompt, row in zip(PROMPTS, finish(engine, job("a"))["a"].rows, strict=True):
        scored = engine.logprobs(np.asarray([*prompt, *row.tokens], dtype=np.int32), 0.7)
        assert row.logprobs == pytest.approx(scored[len(prompt) - 1 :], abs=1e-5)


def test_greedy_is_the_argmax_of_a_forward_without_a_cache(
    engine: EmbeddedEngines, model: PreTrainedModel
) -> None:
    results = finish(engine, job("a", sampling=settings(0.0)))["a"].rows
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
    engine: EmbeddedEngines, model: PreTrainedModel, temperature: float
) -> None:
    results = finish(engine, job("a", sampling=settings(temperature)))["a"].rows
    for prompt, row in zip(PROMPTS, results, strict=True):
        ids = np.asarray([*prompt, *row.tokens.tolist()], dtype=np.int32)
        assert row.logprobs == pytest.approx(
            whole_forward(model, ids, temperature)[len(prompt) - 1 :], abs=1e-5
        )
        scored = engine.logprobs(ids, temperature)
        assert scored.shape == (len(ids) - 1,)
        assert scored == pytest.approx(whole_forward(model, ids, temperature), abs=1e-5)


def whole_forward(
    model: PreTrainedModel, ids: NDArray[np.int32], temperature: float
) -> list[float]:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    table = torch.log(torch.softmax(logits / temperature, dim=-1))
    return [table[t - 1, int(ids[t])].item() for t in range(1, len(ids))]


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_a_bfloat16_engine_makes_logits_of_the_asked_type_and_keeps_its_weights(
    folder: Path, load: Loader, head_dtype: str
) -> None:
    engine = load(folder, "bfloat16", head_dtype)
    tokens = np.asarray([5, 9, 2, 44, 8, 17], dtype=np.int32)
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        hidden, weight = (
            twin.model(torch.tensor(tokens[None].tolist())).last_hidden_state[0],
            twin.lm_head.weight,
        )
        logits = (
            hidden.float() @ weight.float().T
            if head_dtype == "float32"
            else (hidden @ weight.T).float()
        )
    table = torch.log_softmax(logits[:-1] / 0.7, dim=-1)
    expected = table.gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(engine.logprobs(tokens, 0.7), expected.numpy(), atol=1e-5)
    assert {name: each.dtype for name, each in engine.weights().items()} == {
        name: torch.bfloat16 for name, _ in twin.named_parameters()
    }


def test_a_stop_token_ends_its_row_and_is_the_rows_last_token(engine: EmbeddedEngines) -> None:
    free = finish(engine, job("a"))["a"].rows
    stops = frozenset({int(free[0].tokens[4]), int(free[2].tokens[1])})
    stopped = finish(engine, job("a", stops=stops))["a"].rows
    for before, after in zip(free, stopped, strict=True):
        assert_cut_at_first_stop(before, after, stops)
    assert {row.finish for row in stopped} >= {"eos"}


def assert_cut_at_first_stop(
    before: Continuation, after: Continuation, stops: frozenset[int]
) -> None:
    ids = before.tokens.tolist()
    ends = [place for place, token in enumerate(ids) if token in stops]
    expected = ids[: ends[0] + 1] if ends else ids
    assert after.tokens.tolist() == expected
    assert after.finish == ("eos" if ends else "length")
    assert after.logprobs == pytest.approx(before.logprobs[: len(expected)], abs=1e-5)


def test_a_job_ends_when_its_last_row_does(engine: EmbeddedEngines) -> None:
    first = finish(engine, job("a", ([5, 9],)))["a"].rows[0].tokens
    before = engine.progress
    stopped = finish(engine, job("a", ([5, 9],), stops=frozenset({int(first[0])})))["a"].rows[0]
    assert (stopped.tokens.tolist(), stopped.finish) == ([int(first[0])], "eos")
    assert engine.progress == before + 1


def test_a_hostile_generation_config_changes_nothing(
    engine: EmbeddedEngines, load: Loader, tmp_path: Path
) -> None:
    plain = finish(engine, job("a"))["a"]
    greedy = finish(engine, job("a", sampling=settings(0.0)))["a"]
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
    misled = load(folder)
    assert same(plain, finish(misled, job("a"))["a"])
    assert same(greedy, finish(misled, job("a", sampling=settings(0.0)))["a"])


def test_installing_replaces_every_weight_bit_for_bit(engine: EmbeddedEngines) -> None:
    before = finish(engine, job("a"))["a"]
    generator = torch.Generator().manual_seed(1)
    given = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in engine.weights().items()
    }
    old = {name: tensor.clone() for name, tensor in engine.weights().items()}
    assert "lm_head.weight" not in given, "tied weights stand there once"
    engine.install(snapshot_of(1, given))
    assert all(torch.equal(engine.weights()[name], tensor) for name, tensor in given.items())
    assert not same(before, finish(engine, job("a"))["a"])
    engine.install(snapshot_of(1, old))
    assert same(before, finish(engine, job("a"))["a"])


def test_installed_weights_are_copied_not_shared(engine: EmbeddedEngines) -> None:
    given = snapshot_of(1, engine.weights())
    engine.install(given)
    before = finish(engine, job("a"))["a"]
    for tensor in given.tensors.values():
        tensor.zero_()
    assert same(before, finish(engine, job("a"))["a"])


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine: EmbeddedEngines) -> None:
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
