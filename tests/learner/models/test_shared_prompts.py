"""The prompt once for all rows of a group, against every row with its own: the same function, the same step."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models import lora
from prefixrl.learner.models.attention import attn_implementation, shares_prompts
from prefixrl.learner.models.backbone import takes_shared_prompts, visible
from prefixrl.learner.models.batch import IterationData, pad, pad_lines
from prefixrl.learner.models.model import Actor, Critic, Models
from prefixrl.learner.training import iteration
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, VOCABULARY, random_iteration, run_config
from support.models.training import same, trained
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS

TOLERANCE = 1e-6
LORA = {"lora": {"rank": 4, "alpha": 8}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "low rank": LORA,
    "checkpointing": {"gradient_checkpointing": True},
    "low rank and checkpointing": LORA | {"gradient_checkpointing": True},
    "eager": {"attn_implementation": "eager"},
    "ZeRO-2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "ZeRO-3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gae": {},
    "grpo": {"name": "grpo"},
    "rloo": {"name": "rloo", "kl_placement": "loss", "kl_estimator": "k3"},
    "appo": {"name": "appo"},
}


def configs(
    adapter: Path, algorithm: dict[str, Any], learner: dict[str, Any]
) -> tuple[RunConfig, RunConfig]:
    """The same run with shared prompts and without."""
    shared, alone = (
        run_config(adapter, algorithm=algorithm, learner=learner | {"shared_prompts": is_shared})
        for is_shared in (True, False)
    )
    return shared, alone


def gap(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Distance of two lists of tensors, relative to the size of the second.

    Of all together: the gradient of a bias that all keys share is 0 but for rounding.
    """
    one, other = (torch.cat([each.flatten() for each in tensors]) for tensors in (mine, theirs))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("objective", mostly_nightly(OBJECTIVES, 1))
def test_losses_gradient_norms_and_a_step_are_those_of_rows_with_their_own_prompt(
    adapter: Path, objective: str, options: str
) -> None:
    algorithm = OBJECTIVES[objective] | {"minibatches": 1}
    shared, alone = configs(adapter, algorithm, OPTIONS[options])
    data = random_iteration(1)
    (mine,), weights = trained(shared, data)
    (theirs,), expected = trained(alone, data)
    assert mine.means["forward_tokens"] < 0.8 * theirs.means["forward_tokens"]
    assert mine.row_advantages == pytest.approx(theirs.row_advantages, rel=1e-5, abs=1e-5)
    assert mine.steps[0] == pytest.approx(theirs.steps[0], rel=3 * TOLERANCE, abs=TOLERANCE)
    _, initial = trained(alone)
    assert gap(list(weights.values()), list(expected.values())) < TOLERANCE
    assert gap(list(weights.values()), list(initial.values())) > 100 * TOLERANCE


@pytest.mark.parametrize("options", ["plain", "low rank", "checkpointing"])
def test_every_gradient_is_that_of_rows_with_their_own_prompt(adapter: Path, options: str) -> None:
    actual = []
    samples = list(random_iteration(2).samples.values())
    lines = [[each for each in samples if each.group == group] for group in range(4)]
    for batch in (pad_lines(lines, 0), pad(samples, 0)):
        modules = (Actor(fresh(adapter, options)), Critic(fresh(adapter, options), seed=3))
        logprobs, entropy = modules[0](batch.inputs(), 0.7, has_entropy=True)
        values = modules[1](batch.inputs())
        results = [each[batch.mask] for each in (logprobs, entropy, values)]
        factors = torch.linspace(-1, 1, len(results[0]))
        sum(((k + 1) * factors * each).sum() for k, each in enumerate(results)).backward()  # type: ignore[union-attr]
        of_models = [
            [each.grad for each in module.parameters() if each.grad is not None]
            for module in modules
        ]
        actual.append([*([each.detach()] for each in results), *of_models])
    for mine, theirs in zip(*actual, strict=True):
        assert gap(mine, theirs) < TOLERANCE


def fresh(adapter: Path, options: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    if "low rank" in options:
        lora.add(model, LoraConfig(rank=4, alpha=8), 1)
        torch.manual_seed(2)
        for name, each in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(each, std=0.1)
    if "checkpointing" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train("checkpointing" in options)
    return model


def test_a_line_computes_its_prompt_once(adapter: Path) -> None:
    shared, alone = configs(adapter, {}, {})
    data = random_iteration(0)
    prompts = {group: length[0] for group, length in zip(data.groups, data.lengths, strict=True)}
    sampled = sum(length[1] for length in data.lengths)
    for config, expected in (
        (shared, sum(prompts.values()) + sampled),
        (alone, sum(map(sum, data.lengths))),
    ):
        models = Models.load(config, 0, 1, config.adapter.model)
        seen: list[int] = []
        count_tokens(models, seen)
        metrics = train_iteration(models, data, config, 20)
        assert metrics.means["forward_tokens"] == expected
        # Measured once and trained once.
        assert sum(seen) == 2 * metrics.means["padded_tokens"] >= 2 * expected


def count_tokens(models: Models, seen: list[int]) -> None:
    embedding = models.actor.engine.module.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, made: seen.append(given[0].numel()))


def test_a_position_sees_the_prompt_and_its_own_row_up_to_itself() -> None:
    segments = [[0, 0, 0, 1, 1, 2, -1], [0, 1, 2, 2, 3, 3, 3]]
    seen = visible(torch.tensor(segments))
    for line, kinds in enumerate(segments):
        for i, mine in enumerate(kinds):
            if mine >= 0:
                expected = [j <= i and kinds[j] in (0, mine) for j in range(len(kinds))]
                assert seen[line, i].tolist() == expected
        assert seen[line].any(dim=1).all()  # nobody sees nothing: that would be no number


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLAMA_LIKE = SMALL | {"intermediate_size": 24, "num_key_value_heads": 1}
SHAPES: dict[str, tuple[PreTrainedConfig, bool]] = {
    "llama": (LlamaConfig(**LLAMA_LIKE), True),
    "learned positions": (GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2), True),
    "sliding window": (MistralConfig(**LLAMA_LIKE, sliding_window=16), False),
    "positions by the mask": (
        BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
        False,
    ),
    "state space": (MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2), False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_architecture_that_cannot_share_prompts_is_noticed_and_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape, is_able = SHAPES[name]
    shape.initializer_range = 0.2
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(shape).eval()
    with caplog.at_level(logging.WARNING, logger="prefixrl.learner.models.backbone"):
        assert takes_shared_prompts(model) is is_able
    assert ("every row carries its prompt" in caplog.text) is not is_able


def test_without_the_ability_rows_carry_their_prompts_and_train_the_same(
    adapter: Path, tmp_path: Path
) -> None:
    shape = MistralConfig(
        **LLAMA_LIKE, sliding_window=64, pad_token_id=None, eos_token_id=1, initializer_range=0.2
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "mistral")
    asked, alone = configs(tmp_path / "mistral", {}, {})
    (mine,), weights = trained(asked, random_iteration(0))
    (theirs,), expected = trained(alone, random_iteration(0))
    assert mine == theirs and same(weights, expected)


def test_the_kernel_for_packed_rows_serves_where_prompts_are_not_shared(adapter: Path) -> None:
    def chosen(is_direct: bool, device: str = "cuda", **learner: Any) -> tuple[bool, str]:
        config = run_config(adapter, learner={"dtype": "bfloat16"} | learner).learner
        return shares_prompts(config, device, is_direct), attn_implementation(
            config, device, is_direct
        )

    assert chosen(False) == (True, "sdpa")
    assert chosen(True) == (False, "varlen")
    assert chosen(True, "cpu") == (True, "sdpa")
    assert chosen(True, dtype="float32") == (True, "sdpa")
    assert chosen(True, shared_prompts=True) == (True, "sdpa")
    assert chosen(False, shared_prompts=False) == (False, "varlen")
    assert chosen(False, packed=True) == (False, "varlen")
    assert chosen(True, packed=False) == (False, "sdpa")
    for name in ("varlen", "flash_attention_2"):
        assert chosen(False, attn_implementation=name) == (False, name)


def test_padded_rows_are_refused_by_the_kernel_for_packed_ones(adapter: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="takes packed rows alone"):
        run_config(adapter, learner={"packed": False, "attn_implementation": "varlen"})


@pytest.mark.parametrize(
    "other",
    [
        {"packed": True},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": "varlen"},
    ],
)
def test_shared_prompts_with_what_excludes_them_are_refused(
    adapter: Path, other: dict[str, Any]
) -> None:
    with pytest.raises((ConfigError, ValueError), match="shared_prompts = true with"):
        run_config(adapter, learner={"shared_prompts": True} | other)


@pytest.mark.parametrize("options", ["plain", "checkpointing"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "rloo", "kl_placement": "loss", "kl_estimator": "k3", "minibatches": 1},
        {"name": "grpo", "kl": 0.0, "minibatches": 2, "ppo_epochs": 2, "kl_limit": 0.5},
        {"name": "gae", "kl": 0.0, "critic_warmup_steps": 1},
    ],
    ids=lambda each: each["name"],
)
def test_a_first_forward_that_tells_the_proximal_logprobs_changes_nothing(
    adapter: Path, algorithm: dict[str, Any], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(adapter, algorithm=algorithm, learner=OPTIONS[options])
    batches = [random_iteration(number) for number in range(2)]
    metrics, weights = trained(config, *batches)
    monkeypatch.setattr(iteration, "is_measured_late", lambda *given: False)
    expected, expected_weights = trained(config, *batches)
    assert metrics == expected
    assert same(weights, expected_weights)


@pytest.mark.parametrize(
    ("algorithm", "forwards"),
    [
        pytest.param(
            {"name": "rloo", "kl_placement": "loss", "kl_estimator": "k3", "minibatches": 1},
            1.0,
            id="one minibatch and a KL term in the loss",
        ),
        pytest.param({"name": "rloo", "kl": 0.0, "minibatches": 2}, 1.5, id="two minibatches"),
        pytest.param({"name": "rloo", "minibatches": 1}, 2.0, id="a KL term in the reward"),
    ],
)
def test_only_a_needed_proximal_forward_is_run(
    adapter: Path, algorithm: dict[str, Any], forwards: float
) -> None:
    config = run_config(adapter, algorithm=algorithm, learner={"micro_batch_tokens": 1})
    models = Models.load(config, 0, 1, config.adapter.model)
    seen: list[int] = []
    count_tokens(models, seen)
    data: IterationData = random_iteration(0)
    train_iteration(models, data, config, 20)
    assert len(seen) == forwards * len(data.lengths)
