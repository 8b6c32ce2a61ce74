"""Options that change how the models are trained, and not what they learn.

Packing, checkpointing, averages, low-rank matrices.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models import lora
from prefixrl.learner.models.batch import pad
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    random_iteration,
    run_config,
    save_model,
    whole,
)
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS

STAGES = [3, 0, 1, 2]
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "adapter", is_tied=True)


def loaded(adapter: Path, stage: int = 0, **learner: Any) -> tuple[Models, RunConfig]:
    zero = {"zero_optimization": {"stage": stage}}
    config = run_config(adapter, learner={"deepspeed": zero} | learner)
    return Models.load(config, 0, 1, config.adapter.model), config


def steps(models: Models, config: RunConfig, iterations: int = 2) -> list[dict[str, float]]:
    return [
        step
        for iteration in range(iterations)
        for step in train_iteration(models, random_iteration(iteration), config, 20).steps
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", mostly_nightly(STAGES, 1))
@pytest.mark.parametrize(
    "option",
    [
        {"packed": True},
        {"attn_implementation": "varlen"},
        {"attn_implementation": "varlen", "gradient_checkpointing": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_memory_is_saved_without_changing_a_step(
    option: dict[str, Any], stage: int, adapter: Path
) -> None:
    expected = steps(*loaded(adapter, stage))
    for mine, theirs in zip(steps(*loaded(adapter, stage, **option)), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("option", [{"packed": True}, {"attn_implementation": "varlen"}], ids=str)
def test_packed_rows_have_no_padding(option: dict[str, Any], adapter: Path) -> None:
    models, config = loaded(adapter, **option)
    seen: list[torch.Size] = []
    embedding = models.actor.engine.module.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, made: seen.append(given[0].shape))
    data = random_iteration(0)
    train_iteration(models, data, config, 20)
    tokens = sum(prompt + sampled for prompt, sampled in data.lengths)
    assert {shape[0] for shape in seen} == {1}
    # Each row is measured once and trained once, and carries its prompt.
    assert sum(shape[1] for shape in seen) == 2 * tokens


@pytest.mark.parametrize("is_on", [False, True])
def test_checkpointed_layers_run_again_in_the_backward_pass(is_on: bool, adapter: Path) -> None:
    models, config = loaded(adapter, gradient_checkpointing=is_on)
    runs = {"layers": 0, "models": 0}

    def count(name: str) -> Any:
        def hook(module: Any, given: Any) -> None:
            runs[name] += torch.is_grad_enabled()

        return hook

    decoder = models.actor.engine.module.model.get_decoder()
    decoder.register_forward_pre_hook(count("models"))
    decoder.layers[0].mlp.register_forward_pre_hook(count("layers"))
    train_iteration(models, random_iteration(0), config, 20)
    assert runs["layers"] == runs["models"] * (2 if is_on else 1) > 0


@pytest.mark.parametrize("stage", mostly_nightly(STAGES, 1))
def test_the_moving_average_is_that_of_the_weights_after_each_step(
    stage: int, adapter: Path, tmp_path: Path
) -> None:
    decay = 0.6
    models, config = loaded(adapter, stage, ema_decay=decay)
    average = models.state_dict_for_publication()
    for iteration in range(3):
        # One optimiser step per iteration, so that every version is seen here.
        alone = config.model_copy(
            update={"algorithm": config.algorithm.model_copy(update={"minibatches": 1})}
        )
        train_iteration(models, random_iteration(iteration), alone, 20)
        for name, weights in models.state_dict_for_publication().items():
            average[name] = decay * average[name] + (1 - decay) * weights
    trained = models.state_dict_for_publication()
    state = TrainerState(3, models.optimizer_steps, 1)
    folder = checkpoint.save(tmp_path, models, state)
    exported = load_file(folder / "hf_ema" / "model.safetensors")
    for name, weights in average.items():
        assert torch.allclose(exported[name], weights, atol=1e-6)
        assert torch.equal(models.state_dict_for_publication()[name], trained[name])
    resumed, _ = loaded(adapter, stage, ema_decay=decay)
    checkpoint.load(tmp_path, resumed)
    for name, weights in models.actor.ema.items():
        assert torch.equal(resumed.actor.ema[name], weights)


def test_without_a_decay_nothing_is_averaged_and_exported(adapter: Path, tmp_path: Path) -> None:
    models, _ = loaded(adapter)
    folder = checkpoint.save(tmp_path, models, TrainerState(0, 0, 1))
    assert not models.actor.ema and not (folder / "hf_ema").exists()


def test_merging_adds_the_scaled_product() -> None:
    random = torch.Generator().manual_seed(1)
    frozen, first, second = (
        torch.randn(shape, generator=random) for shape in ((5, 3), (2, 3), (5, 2))
    )
    stem = "layers.0.q_proj"
    whole = lora.merged(
        {
            f"{stem}.base_layer.weight": frozen,
            f"{stem}.base_layer.bias": first[0],
            f"{stem}.lora_A.default.weight": first,
            f"{stem}.lora_B.default.weight": second,
            "norm.weight": second[0],
        },
        LoraConfig(rank=2, alpha=6),
    )
    assert set(whole) == {f"{stem}.weight", f"{stem}.bias", "norm.weight"}
    for row in range(5):
        for column in range(3):
            product = sum(float(second[row, k] * first[k, column]) for k in range(2))
            expected = float(frozen[row, column]) + 6 / 2 * product
            assert float(whole[f"{stem}.weight"][row, column]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", mostly_nightly(STAGES, 1))
def test_low_rank_training_publishes_whole_models_and_keeps_its_reference(
    stage: int, adapter: Path, tmp_path: Path
) -> None:
    plain, _ = loaded(adapter)
    models, config = loaded(adapter, stage, lora=LORA)
    assert models.reference is None
    initial = plain.state_dict_for_publication()
    published = models.state_dict_for_publication()
    assert {name: each.shape for name, each in published.items()} == {
        name: each.shape for name, each in initial.items()
    }
    assert all(torch.equal(published[name], each) for name, each in initial.items())
    assert sum(each.numel() for each in models.actor.masters().values()) < sum(
        each.numel() for each in plain.actor.masters().values()
    )

    first, *_, last = steps(models, config)
    assert last["policy_loss"] != first["policy_loss"]
    published = models.state_dict_for_publication()
    moved = {name for name, each in initial.items() if not torch.equal(published[name], each)}
    assert moved and all(name.endswith("_proj.weight") for name in moved)

    probe = [3, 7, 11, 2, 9]
    served = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    with torch.no_grad():
        served.load_state_dict(published, strict=False)
        logits = served(torch.tensor([probe])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(probe[1:])[:, None])[:, 0]
    assert models.probe_logprobs([whole(probe)]) == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_reference_of_low_rank_training_is_the_initial_model(adapter: Path) -> None:
    plain, config = loaded(adapter)
    models, _ = loaded(adapter, lora=LORA)
    seen: list[torch.Tensor] = []
    for loaded_models in (plain, models):
        forward = loaded_models.forward_reference
        loaded_models.forward_reference = lambda batch, forward=forward: (
            seen.append(out := forward(batch)) or out
        )  # type: ignore[method-assign]
        steps(loaded_models, config)
    half = len(seen) // 2
    assert half > 2
    for mine, theirs in zip(seen[half:], seen[:half], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_heads_low_rank_matrices_are_trained_and_off_in_the_reference(tmp_path: Path) -> None:
    adapter = save_model(tmp_path / "adapter")
    models, config = loaded(adapter, lora=LORA | {"target_modules": ["lm_head"]})
    initial = models.state_dict_for_publication()
    batch = pad(list(random_iteration(0).samples.values()), 0)
    before = models.forward_reference(batch)
    steps(models, config)
    published = models.state_dict_for_publication()
    assert [name for name, each in initial.items() if not torch.equal(published[name], each)] == [
        "lm_head.weight"
    ]
    assert before is not None and torch.equal(before, models.forward_reference(batch))
    served = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    served.load_state_dict(published, strict=False)
    probe = [3, 7, 11, 2, 9]
    with torch.no_grad():
        logits = served(torch.tensor([probe])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(probe[1:])[:, None])[:, 0]
    assert models.probe_logprobs([whole(probe)]) == pytest.approx(expected.tolist(), abs=1e-4)


def test_low_rank_training_resumes_bitwise(adapter: Path, tmp_path: Path) -> None:
    models, config = loaded(adapter, 2, lora=LORA)
    steps(models, config)
    state = TrainerState(2, models.optimizer_steps, 1)
    checkpoint.save(tmp_path, models, state)
    resumed, _ = loaded(adapter, 2, lora=LORA)
    checkpoint.load(tmp_path, resumed)
    assert steps(resumed, config, 1) == steps(models, config, 1)


def test_target_modules_that_are_not_there_are_refused_by_name(adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_modules = \['query'\].*'q_proj'"):
        loaded(adapter, lora=LORA | {"target_modules": ["query"]})


@pytest.mark.parametrize(
    ("module", "said"), [("lm_head", "shares its weight"), ("embed_tokens", "is a Embedding")]
)
def test_targets_that_could_not_be_published_are_refused_by_name(
    module: str, said: str, adapter: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"target_modules = \['{module}'\].*{said}"):
        loaded(adapter, lora=LORA | {"target_modules": [module]})
