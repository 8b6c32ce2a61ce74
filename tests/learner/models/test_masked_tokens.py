"""Control tokens are drawn by no engine, and the learner's logprobs are of the same distribution."""

from pathlib import Path

import numpy as np
import pytest
import torch

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.learner.models.batch import PaddedRows, Sample, pad
from prefixrl.learner.models.model import Models
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model, whole
from support.paths import EXAMPLE

pytestmark = DEEPSPEED_WARNINGS

TEMPERATURE = 4.0
"""At 1 the example's adapter hardly ever draws a control token."""
TOKENS, ROWS = 16, 64


def run_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", (f"rollout.temperature={TEMPERATURE}", "learner.device=cpu", *settings))


def sampled(config: RunConfig, masked: frozenset[int], greedy: bool = False) -> PaddedRows:
    """Rows of the embedded engine, as the learner takes them."""
    renderer = renderer_of(config, "rollout")
    engine = TransformersEngine(config.adapter.model, "cpu", "float32", 1)
    prompts = tuple(renderer.prompt(f"sum {digit % 10} 4 1") for digit in range(ROWS))
    sampling = Sampling(temperature=0.0 if greedy else TEMPERATURE, max_new_tokens=TOKENS)
    draws = row_uniforms(3, "prefix", ROWS, TOKENS)
    engine.submit(Job("a", prompts, draws, sampling, renderer.stop_tokens, masked_tokens=masked))
    results = []
    while not results:
        results = engine.step(0.0)
    rows = zip(prompts, results[0].rows, strict=True)
    return pad(
        [Sample(ask, row.tokens, row.logprobs, 0.0, 0, np.ones(row.tokens.size, np.int32)) for ask, row in rows], 0
    )


def drawn(batch: PaddedRows) -> set[int]:
    return set(batch.inputs()["tokens"][batch.mask].tolist())


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
    assert (mine - batch.behaviour).abs()[batch.mask].max() < 1e-5
    assert torch.equal(mine, reference)
    assert entropy[batch.mask].max() < np.log(40 - len(control))
    models.masked = None
    with torch.no_grad():
        assert (models.forward_actor(batch)[0] - batch.behaviour).abs()[batch.mask].mean() > 0.01


def test_a_greedy_draw_keeps_to_the_mask() -> None:
    config = run_of()
    likely = drawn(sampled(config, frozenset(), greedy=True))
    assert drawn(sampled(config, frozenset(likely), greedy=True)).isdisjoint(likely)


def test_allowed_control_tokens_are_drawn_and_the_learner_has_no_mask() -> None:
    config = run_of("rollout.control_tokens=allow")
    models = Models.load(config, 0, 1, config.adapter.model)
    assert models.masked is None
    batch = sampled(config, frozenset())
    with torch.no_grad():
        assert (models.forward_actor(batch)[0] - batch.behaviour).abs()[batch.mask].max() < 1e-5


def test_a_tokenizer_without_control_tokens_leaves_everything_as_it_is(tmp_path: Path) -> None:
    """A folder without any tokenizer, as in tests of the learner alone, has none either."""
    config = run_config(save_model(tmp_path / "model"))
    assert Models.load(config, 0, 1, config.adapter.model).masked is None


def test_the_probe_is_of_the_whole_distribution() -> None:
    config = run_of()
    tokens = [3, 19, 8, 4, 2, 0]
    probed = Models.load(config, 0, 1, config.adapter.model).probe_logprobs([whole(tokens)], TEMPERATURE)
    engine = TransformersEngine(config.adapter.model, "cpu", "float32", 1)
    assert probed == pytest.approx(engine.logprobs(np.asarray(tokens), TEMPERATURE).tolist(), abs=1e-5)
