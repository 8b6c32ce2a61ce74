"""The bodies of the GPU tests, small and on the CPU: what `make gpu` runs is not code that never ran."""

from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config

from gpu import on_device
from gpu.vllm_on_device import beside_the_learner
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model

pytestmark = [pytest.mark.nightly, *DEEPSPEED_WARNINGS]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapter"))


def test_every_variant_takes_the_steps_of_the_plain_one(adapter: Path) -> None:
    actual = on_device.losses("cpu", adapter)
    for name, values in actual.items():
        assert np.isfinite(values).all() and (
            name in on_device.OWN or values == pytest.approx(actual["stage 0"], abs=1e-4)
        ), name


def test_a_resume_goes_on_and_a_step_with_a_nan_is_dropped(adapter: Path, tmp_path: Path) -> None:
    assert on_device.resumed_and_poisoned("cpu", adapter, tmp_path) == (0.0, True)


@pytest.mark.nightly
@pytest.mark.parametrize("vocabulary", [200, 20_000])
def test_a_whole_iteration_takes_the_memory_that_the_forecast_says(
    tmp_path: Path, vocabulary: int
) -> None:
    shape = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    folder = on_device.save_random(tmp_path / "adapter", shape, "bfloat16")
    config = run_config(
        folder,
        rollout={"temperature": 0.7, "prefix_tokens": 16},
        algorithm={"groups_per_iteration": 8, "samples_per_prompt": 8, "minibatches": 1},
        learner={
            "dtype": "bfloat16",
            "micro_batch_tokens": 4096,
            "deepspeed": {"zero_optimization": {"stage": 2}},
        },
    )
    for settings in (config, on_device.with_settings(config, gradient_checkpointing=True)):
        peak = on_device.memory_and_speed(settings, 48, "small")[0]
        assert peak.ratio is not None and 0.85 < peak.ratio < 1.02


def test_a_copy_from_the_device_is_whole(tmp_path: Path) -> None:
    assert len(on_device.publication("cpu", 2**22, tmp_path)) == 5


def test_the_probe_is_exact_in_float32_and_sees_another_version(adapter: Path) -> None:
    actual = on_device.probe("cpu", adapter, "float32", 4.0, 64)
    assert actual["right version"].max() < 1e-4 < np.median(actual["weights 2 % off"])
    assert len(on_device.probe_figures(actual, "float32")) == 6


@pytest.mark.timeout(400)
def test_a_run_with_a_killed_rollout_ends_well(tmp_path: Path) -> None:
    assert len(on_device.whole_run("cpu", tmp_path / "run", 3)) == 2


def test_two_ranks_train_what_one_trains_and_publish_the_same_weights(tmp_path: Path) -> None:
    save_model(tmp_path / "adapter")
    alone, both = (on_device.of_ranks("cpu", tmp_path, ranks) for ranks in (1, 2))
    for stage, actual in both.items():
        assert actual["digest"] == alone[stage]["digest"] != ""
        assert actual["losses"] == pytest.approx(alone[stage]["losses"], abs=1e-4)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
def test_vllm_samples_the_learners_policy_before_and_after_an_installation(tmp_path: Path) -> None:
    shape = Qwen2Config(
        vocab_size=600,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    adapter = on_device.save_random(tmp_path / "adapter", shape, "float32")
    assert len(beside_the_learner("cpu", adapter, "float32", 8, 200)) == 15


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_a_run_with_both_models_in_vllm_outlives_a_killed_rollout(tmp_path: Path) -> None:
    assert len(on_device.whole_run("cpu", tmp_path / "run", 3, "vllm")) == 2
