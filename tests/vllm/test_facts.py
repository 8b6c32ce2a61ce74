"""The config that vLLM makes of our arguments: its own batch sizes, and what speeds up a frozen target."""

from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.engines.vllm.facts import RowCounts, about, engine_config, seats_of
from prefixrl.common.engines.vllm.setup import engine_arguments, prepare_environment, resolve
from prefixrl.common.errors import UserError
from support.paths import EXAMPLE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def made(role: str, *changes: str) -> Any:
    """vLLM's config of a role of the example, without an engine."""
    setup = resolve(
        str(EXAMPLE / ("adapter" if role == "rollout" else "target")),
        role,
        load(EXAMPLE / "run.toml", changes),
    )
    prepare_environment(setup, "cpu")
    return engine_config(engine_arguments(setup, "cpu"))


@pytest.mark.parametrize("role", ["rollout", "scorer"])
def test_batches_are_as_large_as_vllm_makes_them_for_a_program_of_its_own(
    vllm_is_there: None, role: str
) -> None:
    config = made(role)
    assert config.scheduler_config.max_num_batched_tokens == 4096, "2048 without a usage context"
    assert config.scheduler_config.max_num_seqs == seats_of(config) == 256


def test_declared_batches_reach_vllm(vllm_is_there: None) -> None:
    config = made(
        "scorer",
        "scorer.vllm.max_num_seqs=24",
        "scorer.vllm.options={ max_num_batched_tokens = 1024 }",
    )
    assert (
        config.scheduler_config.max_num_seqs,
        config.scheduler_config.max_num_batched_tokens,
    ) == (24, 1024)
    assert (
        "max_num_seqs 24, max_num_batched_tokens 1024, room for keys and values known at the start"
        in about(config)
    )


def test_a_frozen_target_may_be_drafted_and_keep_its_cache_in_fp8(vllm_is_there: None) -> None:
    draft = "speculative_config = { method = 'ngram', num_speculative_tokens = 3, prompt_lookup_max = 4 }"
    config = made("scorer", f"scorer.vllm.options={{ {draft}, kv_cache_dtype = 'fp8' }}")
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == (
        "ngram",
        3,
    )
    assert config.cache_config.cache_dtype == "fp8"
    assert about(config).endswith("kv_cache_dtype fp8, speculative ngram of 3 tokens")


def test_quantisation_of_a_target_reaches_vllm(vllm_is_there: None) -> None:
    fp8 = "scorer.vllm.quantization=fp8"
    assert made("scorer", fp8, "scorer.vllm.dtype=bfloat16").model_config.quantization == "fp8"
    with pytest.raises(
        UserError, match=r"vLLM refuses [\s\S]*not supported for quantization method fp8"
    ):
        made("scorer", fp8)


def test_only_rollouts_load_the_plugin_for_new_weights(vllm_is_there: None) -> None:
    assert made("rollout").weight_transfer_config.backend == "prefixrl"
    assert made("scorer").weight_transfer_config is None


def test_row_seconds_are_those_between_two_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("prefixrl.common.engines.vllm.facts.time.monotonic", lambda: now_s[0])
    counts = RowCounts()
    for engine, running, passed_s in ((0, 3, 2.0), (1, 5, 1.0), (0, 1, 4.0)):
        counts.note_running(engine, running)
        now_s[0] += passed_s
    assert counts.running == 6 and counts.busy_row_s == 3 * 2.0 + 8 * 1.0 + 6 * 4.0
    counts.note_idle()
    now_s[0] += 50.0
    assert counts.running == 0 and counts.busy_row_s == 38.0
