"""Actor, critic and reference against the Hugging Face model they were loaded from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.models.batch import pad
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.trained_model import deepspeed_settings
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    random_iteration,
    run_config,
    save_model,
    whole,
)

pytestmark = DEEPSPEED_WARNINGS

PROBE = [3, 14, 15, 9, 2, 6, 53]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapter"), is_tied=True)


def loaded(config: RunConfig) -> Models:
    return Models.load(config, 0, 1, config.adapter.model)


def test_logprobs_are_those_of_the_unpadded_model_at_the_sampling_temperature(
    adapter: Path,
) -> None:
    models = loaded(run_config(adapter))
    samples = list(random_iteration(0).samples.values())
    with torch.no_grad():
        logprobs, _ = models.forward_actor(pad(samples, 0))
    model = AutoModelForCausalLM.from_pretrained(adapter)
    for row, sample in enumerate(samples):
        prompt, tokens = sample.prompt_tokens.tolist(), sample.tokens.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        twin = torch.log_softmax(logits / 0.7, dim=-1)[range(len(tokens)), tokens]
        torch.testing.assert_close(logprobs[row, : len(tokens)], twin, atol=1e-5, rtol=0)


def test_the_reference_is_the_initial_adapter_and_absent_without_a_kl(adapter: Path) -> None:
    models = loaded(run_config(adapter))
    batch = pad(list(random_iteration(0).samples.values()), 0)
    with torch.no_grad():
        assert torch.equal(models.forward_actor(batch)[0], models.forward_reference(batch))
    assert loaded(run_config(adapter, algorithm={"kl": 0.0})).forward_reference(batch) is None


def test_the_critics_head_is_small_seeded_and_without_bias(adapter: Path) -> None:
    critic, again = (loaded(run_config(adapter)).critic for _ in range(2))
    other = loaded(run_config(adapter, seed=43)).critic  # type: ignore[arg-type]
    heads = [dict(each.full_tensors())["head.weight"] for each in (critic, again, other)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert "head.bias" not in dict(critic.full_tensors())
    assert 0.4 < heads[0].std() * 17 < 1.6  # N(0, 1 / (hidden + 1)^2), hidden = 16


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_published_weights_answer_the_probe_as_the_learner_does(
    adapter: Path, stage: int, dtype: str
) -> None:
    learner = {"deepspeed": {"zero_optimization": {"stage": stage}}, "dtype": dtype}
    config = run_config(adapter, learner=learner)
    models = loaded(config)
    before = models.probe_logprobs([whole(PROBE)])
    train_iteration(models, random_iteration(0), config, 20)
    weights, probe = models.state_dict_for_publication(), models.probe_logprobs([whole(PROBE)])
    assert max(abs(a - b) for a, b in zip(probe, before, strict=True)) > 1e-4
    engine = AutoModelForCausalLM.from_pretrained(adapter, dtype=getattr(torch, dtype))
    missing = engine.load_state_dict(weights, strict=False)
    assert (
        missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    )  # tied: sent once
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in weights.values())
    with torch.no_grad():
        hidden = engine.model(torch.tensor([PROBE])).last_hidden_state[0]
        logits = hidden.float() @ engine.lm_head.weight.float().T
    twin = torch.log_softmax(logits[:-1], dim=-1)[range(len(PROBE) - 1), PROBE[1:]]
    torch.testing.assert_close(torch.tensor(probe), twin, atol=1e-5, rtol=0)


def test_published_weights_are_a_copy_that_later_steps_do_not_change(adapter: Path) -> None:
    config = run_config(adapter)
    models = loaded(config)
    weights = models.state_dict_for_publication()
    frozen = {name: tensor.clone() for name, tensor in weights.items()}
    train_iteration(models, random_iteration(0), config, 20)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("deepspeed", "named"),
    [
        pytest.param(
            {"gradient_clipping": 3.0}, "gradient_clipping.*learner.grad_clip", id="clipping"
        ),
        pytest.param({"bf16": {"enabled": True}}, "bf16.*learner.dtype", id="bf16"),
        pytest.param(
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "'float16'.*scale.*allowed are .bfloat16.",
            id="autocast to float16",
        ),
        pytest.param(
            {"torch_autocast": {"enabled": True}},
            "torch_autocast.dtype = None.*allowed are .bfloat16.",
            id="autocast without a type",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 4}},
            "stage = 4; allowed are 0, 1, 2 and 3",
            id="stage 4",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "nvme.*allowed",
            id="parameters on NVMe",
        ),
    ],
)
def test_deepspeed_settings_that_the_learner_decides_are_refused(
    adapter: Path, deepspeed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        deepspeed_settings(run_config(adapter, learner={"deepspeed": deepspeed}).learner, 10)


def test_other_deepspeed_settings_pass_through(adapter: Path) -> None:
    deepspeed = {
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "wall_clock_breakdown": True,
    }
    settings = deepspeed_settings(run_config(adapter, learner={"deepspeed": deepspeed}).learner, 10)
    assert settings["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": 10,
    }
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_clipping"] == 1.0
    assert "communication_data_type" not in settings


@pytest.mark.nightly
def test_gradients_of_bfloat16_are_added_up_over_ranks_in_float32(adapter: Path) -> None:
    config = run_config(adapter, learner={"dtype": "bfloat16"})
    engine = loaded(config).actor.engine
    assert engine.communication_data_type == torch.float32
