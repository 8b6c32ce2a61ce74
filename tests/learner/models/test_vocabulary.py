"""Whatever the sizes of embedding and tokenizer are: no id without a token is drawn, asked or sent."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.embedded.held_model import EmbeddedEngine
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.models.config_file import positions_of
from prefixrl.common.prompts.asking import asking_lines, renderers_here
from prefixrl.common.prompts.rendering import Renderer, continued_prefix, renderer_of
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.learner.data.lengths import unaskable
from prefixrl.learner.data.rows import Problem
from prefixrl.learner.models.batch import PaddedRows, Sample, pad
from prefixrl.learner.models.model import Models
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    run_config,
    save_model,
    whole,
    with_tokenizer,
)
from support.paths import EXAMPLE

pytestmark = DEEPSPEED_WARNINGS
TOKENS, ROWS = 12, 32


def model(folder: Path, rows: int, words: int, added: tuple[str, ...] = (), **keys: Any) -> Path:
    """A model whose embedding has `rows` rows, and a tokenizer of `words` words and the added ones.

    Every logit is about as likely as another: what is not masked is drawn.
    """
    return with_tokenizer(
        save_model(folder, vocab_size=rows, num_hidden_layers=1, **keys), words, added
    )


def run_of(*settings: str) -> RunConfig:
    """The example, at a temperature at which its adapter draws control tokens too."""
    return load(EXAMPLE / "run.toml", ("rollout.temperature=4.0", "learner.device=cpu", *settings))


def sampled(
    config: RunConfig,
    masked: frozenset[int],
    ask: str = "sum {} 4 1",
    kind: type[EmbeddedEngine] = TransformersEngine,
    is_greedy: bool = False,
) -> PaddedRows:
    """Rows of an embedded engine, as the learner takes them."""
    renderer, engine = (
        renderer_of(config, "rollout"),
        kind(config.adapter.model, "cpu", "float32", 1),
    )
    prompts = tuple(renderer.prompt(ask.format(2 + digit % 5)) for digit in range(ROWS))
    sampling = Sampling(
        temperature=0.0 if is_greedy else config.rollout.temperature, max_new_tokens=TOKENS
    )
    draws = row_uniforms(3, "prefix", ROWS, TOKENS)
    engine.submit(Job("a", prompts, draws, sampling, renderer.stop_tokens, masked_tokens=masked))
    while not (results := engine.step(0.0)):
        pass
    rows = zip(prompts, results[0].rows, strict=True)
    return pad(
        [
            Sample(of, row.tokens, row.logprobs, 0.0, 0, np.ones(row.tokens.size, np.int32))
            for of, row in rows
        ],
        0,
    )


def drawn(batch: PaddedRows) -> set[int]:
    return set(batch.inputs()["tokens"][batch.mask].tolist())


def gap(models: Models, batch: PaddedRows) -> torch.Tensor:
    """Differences of the learner's logprobs from the engine's."""
    with torch.no_grad():
        return (models.forward_actor(batch)[0] - batch.behaviour).abs()[batch.mask]


@settings(max_examples=8, phases=[Phase.generate])
@given(
    words=st.integers(12, 40),
    beside=st.integers(-5, 60),
    added=st.integers(0, 3),
    is_tied=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    other=st.tuples(st.integers(4, 50), st.integers(-5, 20)),
    kind=st.sampled_from([TransformersEngine, FixedRowsEngine]),
)
def test_rows_hold_tokens_alone_and_engine_and_learner_agree_on_them(
    words: int,
    beside: int,
    added: int,
    is_tied: bool,
    temperature: float,
    other: tuple[int, int],
    kind: type[EmbeddedEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    names = ("<a>", "<b>", "<c>")[:added]
    folder = model(tmp_path_factory.mktemp("m"), words + beside, words, names, is_tied=is_tied)
    config = run_config(folder, rollout={"temperature": temperature})
    renderer = renderer_of(config, "rollout")
    assert renderer.tokens == set(range(min(words + beside, words + added)))
    batch = sampled(
        config, renderer.never_drawn("mask"), "w{} w3", kind, is_greedy=temperature == 1.0
    )
    assert drawn(batch) <= renderer.tokens - renderer.control_tokens
    assert gap(Models.load(config, 0, 1, str(folder)), batch).max() < 1e-5
    target = Renderer(
        str(model(tmp_path_factory.mktemp("t"), max(4, sum(other)), other[0], names[::-1])), 100
    )
    for ids in batch.inputs()["tokens"].numpy():
        with suppress(ValueError):  # it has a token without a row in the target's embedding
            assert (
                set(continued_prefix(target, ids, renderer.decode_with_special(ids))[0])
                <= target.tokens
            )


def test_the_learners_logprobs_are_those_of_the_masked_draw() -> None:
    config = run_of()
    control = renderer_of(config, "rollout").control_tokens
    batch = sampled(config, control)
    assert drawn(batch).isdisjoint(control)
    assert drawn(sampled(config, frozenset())) & control, "without the mask some are drawn"
    models = Models.load(config, 0, 1, config.adapter.model)
    with torch.no_grad():
        mine, entropy = models.forward_actor(batch, has_entropy=True)
        reference = models.forward_reference(batch)
    assert gap(models, batch).max() < 1e-5
    assert torch.equal(mine, reference)
    assert entropy[batch.mask].max() < np.log(40 - len(control))
    models.masked = None
    assert gap(models, batch).mean() > 0.01


def test_the_probe_is_of_the_whole_distribution() -> None:
    config = run_of()
    tokens = [3, 19, 8, 4, 2, 0]
    probed = Models.load(config, 0, 1, config.adapter.model).probe_logprobs([whole(tokens)], 4.0)
    engine = TransformersEngine(config.adapter.model, "cpu", "float32", 1)
    assert probed == pytest.approx(engine.logprobs(np.asarray(tokens), 4.0).tolist(), abs=1e-5)


@pytest.mark.slow
def test_the_vocabulary_of_qwen_is_masked_and_told(tmp_path: Path) -> None:
    """151,936 rows and 151,665 tokens, of which the last 22 are added, as in its published files."""
    folder = model(
        tmp_path / "qwen",
        151_936,
        151_643,
        tuple(f"<|t{index}|>" for index in range(22)),
        is_tied=True,
    )
    config = run_config(folder)
    renderer = renderer_of(config, "rollout")
    assert renderer.never_drawn("allow") == set(range(151_665, 151_936))
    said = asking_lines(config, renderers_here(config), "w5")
    masked = "never drawn: 271 ids that are no token, 1 control tokens"
    assert f"adapter: 151,665 tokens, 151,936 rows of the embedding; {masked}" in said
    assert not [each for each in said if "vLLM leaves out" in each]
    assert "target: 151,665 tokens, 151,936 rows of the embedding" in said
    mask = Models.load(config, 0, 1, str(folder)).masked
    assert mask is not None and mask.sum() == 272 and mask[151_665:].all()


def test_a_target_gets_no_id_that_is_no_token_of_its_own(tmp_path: Path) -> None:
    adapter = Renderer(str(model(tmp_path / "adapter", 40, 20, ("<a>", "<b>"))), 100)
    short, long = (
        Renderer(str(model(tmp_path / name, rows, 20)), 100)
        for name, rows in (("s", 18), ("l", 60))
    )
    ids = np.asarray([5, 30, 31], np.int32)  # the last two decode to nothing in every tokenizer
    for target in (short, long):
        actual, was_text = continued_prefix(target, ids, adapter.decode_with_special(ids))
        assert was_text and actual.tolist() == [5]
        with pytest.raises(ValueError, match="has a token without a row in the target's embedding"):
            continued_prefix(target, ids, None)
    with pytest.raises(ValueError, match="has a token without a row in the target's embedding"):
        continued_prefix(short, np.asarray([5, 19], np.int32), "w5 w19")


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (
            "w5 zzz",
            r"prompt has token 20 \('zzz'\), the embedding of .* has 20 rows: resize it, or give the tok.*",
        ),
        (
            "w5 w1 w6",
            r"the question has 'w1', special in the tokenizer of .*data.special_tokens = \"allow\" lets it",
        ),
        (
            "w5 " * 40,
            r"prompt has 40 tokens, allowed are 1 to 27 \(the model's positions, and rollout.max",
        ),
        ("w5 w6", ""),
    ],
)
def test_a_question_that_a_model_cannot_be_asked_is_named_before_the_run(
    question: str, reason: str, tmp_path: Path
) -> None:
    folder = model(tmp_path / "m", 20, 20, ("zzz",), max_position_embeddings=32)
    config = run_config(folder, rollout={"prefix_tokens": 4})
    actual = unaskable([Problem("p", question, "1"), Problem("q", "w2", "1")], config)
    assert set(actual) == ({"p"} if reason else set())
    assert re.match(reason, actual.get("p", ""))
    said = asking_lines(config, renderers_here(config), "w2")
    assert (
        "warning: adapter: 1 tokens have no row in the embedding: a question with one is a bad row"
        in said
    )


def test_positions_are_counted_with_their_scaling() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    kinds = [None, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 3.0}, yarn]
    kinds += [
        {"rope_type": "llama3", "factor": 8.0},
        {"type": "longrope"},
        {"full_attention": {"rope_type": "linear"}},
    ]
    actual = [positions_of({"max_position_embeddings": 32, "rope_scaling": each}) for each in kinds]
    assert actual == [32, 64, 96, 128, 32, 32, 32]
    assert positions_of({"n_positions": 64}) == 64 and positions_of({}) is None
