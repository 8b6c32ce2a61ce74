"""Memory of a scorer's process reward model: its bytes against counted ones, shares of its GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import VARIABLE, place, processes_of
from prefixrl.learner.__main__ import _placed, main
from prefixrl.learner.check.budget import (
    HIDDEN_COPIES,
    check_fit,
    process_fault,
    process_footprint,
    process_lines,
    process_share,
)
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB
from prefixrl.learner.check.shares import Demand, demands, divide, with_shares
from support.models.recipes import recipe, settings_of
from support.paths import EXAMPLES

PRM = {"model": "Qwen/Qwen2.5-Math-PRM-7B", "format": "two_class"}
LIMIT = 79 * GIB


def flags(**keys: Any) -> tuple[str, ...]:
    return tuple(f"scorer.prm.{key}={value}" for key, value in (PRM | keys).items())


def planned(folder: Path, *settings: str, **keys: Any) -> RunConfig:
    """The recipe with a target of 7B and a process reward model of 7B."""
    return recipe("math_qwen2.5", folder, *flags(**keys), *settings)


def tiny(folder: Path) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_weights_and_the_cache_of_a_text_are_those_of_a_real_model(
    tmp_path: Path, engine: str
) -> None:
    model = tiny(tmp_path / "prm")
    actual = process_footprint(
        planned(
            tmp_path,
            model=tmp_path / "prm",
            format="step_tag",
            engine=engine,
            max_tokens=24,
            batch_tokens=48,
        )
    )
    assert actual is not None
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    assert held <= actual.weights <= held + 10_000  # the header of the file
    with torch.no_grad():
        cache = model(
            input_ids=torch.zeros((1, 24), dtype=torch.int64), use_cache=True
        ).past_key_values
    counted = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert actual.text_cache == (pytest.approx(counted, rel=0.05) if engine == "vllm" else 0)
    assert actual.forward == pytest.approx(48 * 32 * 4 * HIDDEN_COPIES, rel=0.05)
    assert actual.needed == actual.weights + actual.forward + actual.text_cache + CONTEXT_BYTES


def test_in_vllm_it_takes_its_share_and_in_transformers_what_it_needs(tmp_path: Path) -> None:
    in_vllm, in_transformers = (
        process_footprint(planned(tmp_path, engine=each)) for each in ("vllm", "transformers")
    )
    assert in_vllm is not None and in_transformers is not None
    assert in_vllm.device_share(LIMIT) == 0.3
    assert (
        in_transformers.device_share(LIMIT)
        == in_transformers.needed / LIMIT
        == pytest.approx(0.24, abs=0.03)
    )
    assert process_share(planned(tmp_path, device="cpu"), LIMIT) == 0
    (line,) = process_lines(planned(tmp_path, engine="vllm"), LIMIT)
    assert "14.19 GiB of weights" in line and "224.0 MiB of keys and values per text" in line
    assert line.endswith("; 0.30 of a GPU of 79.0 GiB")


def test_a_target_in_vllm_gets_what_the_process_reward_model_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(tmp_path, engine="vllm")
    needed = demands(config, LIMIT, 110)["scorer"]
    assert needed.beside == 0.3 and needed.share is None
    placed = {"learner": (0,), "rollout-0": (0,), "scorer-0": (1,)}
    actual, lines = with_shares(config, placed, 110)
    assert actual.scorer.vllm.gpu_memory_utilization == 0.68
    assert lines[1] == "GPU 1: scorer-0 0.68, process reward model 0.30"
    # Where nobody says who is where, too; on the CPU there is nothing to leave.
    monkeypatch.delenv(VARIABLE, raising=False)
    assert _placed(config).scorer.vllm.gpu_memory_utilization == 0.68
    on_cpu = planned(tmp_path, engine="transformers", device="cpu")
    assert _placed(on_cpu) == on_cpu


def test_only_the_first_gpu_of_a_scorer_has_the_process_reward_model() -> None:
    demanded = {"scorer": Demand(0.2, None, beside=0.25), "learner": Demand(0.5, 0.5)}
    actual = divide({"scorer-0": (0, 1), "learner": (2,)}, demanded)
    assert actual.chosen == {"scorer": 0.73}
    assert actual.lines == [
        "GPU 0: scorer-0 0.73, process reward model 0.25",
        "GPU 1: scorer-0 0.73",
        "GPU 2: learner 0.50",
    ]


def test_shares_that_exceed_a_gpu_together_are_refused_when_the_run_file_is_read(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"0\.9 with prm\.gpu_memory_utilization = 0\.3: target and"
    ):
        planned(tmp_path, "scorer.vllm.gpu_memory_utilization=0.9", engine="vllm")
    planned(tmp_path, "scorer.vllm.gpu_memory_utilization=0.7", engine="vllm")


def test_a_share_given_to_the_target_that_leaves_too_little_for_the_model_is_refused(
    tmp_path: Path,
) -> None:
    config = planned(tmp_path, "scorer.vllm.gpu_memory_utilization=0.9", engine="transformers")
    message = (
        r"GPU 0 has not enough memory for 1 process and .*: "
        r"scorer-0 0\.90, process reward model 0\.2\d; .*scorer\.prm"
    )
    with pytest.raises(ConfigError, match=message):
        with_shares(config, {}, 110)


def placed_lines(config: RunConfig, gpus: int) -> list[str]:
    return with_shares(config, place(processes_of(config), gpus), 110)[1]


def test_in_direct_mode_each_scorer_has_a_gpu_for_the_model_and_several_on_one_are_all_counted(
    tmp_path: Path,
) -> None:
    config = recipe("openr_math", tmp_path, "adapter.model=Qwen/Qwen2.5-1.5B", "launch.scorers=2")
    share = process_footprint(config).needed / LIMIT  # type: ignore[union-attr]
    assert 0.18 < share < 0.25
    assert placed_lines(config, 4)[2:] == [
        f"GPU {2 + n}: scorer-{n}, process reward model {share:.2f}" for n in (0, 1)
    ]
    (line,) = placed_lines(config, 1)
    assert line.endswith(f"scorer-0, scorer-1, process reward model {2 * share:.2f}")
    crowded = recipe("openr_math", tmp_path, "adapter.model=Qwen/Qwen2.5-1.5B", "launch.scorers=5")
    with pytest.raises(
        ConfigError, match=rf"GPU 0 .*scorer-4 0\.00, process reward model {5 * share:.2f}"
    ):
        placed_lines(crowded, 1)


def test_beside_a_target_served_elsewhere_the_model_has_the_scorers_gpu_to_itself(
    tmp_path: Path,
) -> None:
    served = ("scorer.engine=openai", "scorer.openai.url=http://there:1/v1", "launch.scorers=2")
    config = planned(tmp_path, *served)
    assert (
        config.gpus_of("scorer") == 1
        and planned(tmp_path, *served, device="cpu").gpus_of("scorer") == 0
    )
    actual = process_footprint(config)
    assert actual is not None and actual.context == CONTEXT_BYTES
    assert placed_lines(config, 4)[2:] == [
        f"GPU {2 + n}: scorer-{n}, process reward model {actual.needed / LIMIT:.2f}" for n in (0, 1)
    ]
    (line,) = process_lines(config, LIMIT)
    assert line.startswith("a scorer's process reward model: 14.19 GiB of weights")


def test_a_model_that_its_share_is_too_small_for_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    config = planned(tmp_path, engine="vllm", gpu_memory_utilization=0.15)
    said = process_fault(config, LIMIT)
    assert (
        said.startswith("the process reward model needs ")
        and "has 0.15 of 79.0 GiB; raise scorer.prm.gpu_memory" in said
    )
    with pytest.raises(ConfigError, match="the process reward model needs"):
        check_fit(config, 110)
    assert process_fault(planned(tmp_path, engine="vllm"), LIMIT) == ""
    large = planned(tmp_path, model="Qwen/Qwen2.5-Math-PRM-72B")
    assert "has 79.0 GiB; lower scorer.prm.batch_tokens, or name" in process_fault(large, LIMIT)


def test_the_check_refuses_a_target_that_has_no_room_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(**keys: Any) -> Any:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        settings = (*settings_of(tmp_path), *flags(**keys), "launch.scorers=1")
        given_flags = [part for each in settings for part in ("--set", each)]
        return CliRunner().invoke(
            main, [str(EXAMPLES / "math_qwen2.5/run.toml"), *given_flags, "--check"]
        )

    fits = checked(engine="vllm")
    assert fits.exit_code == 0, fits.output
    assert "GPU 1: scorer-0 0.68, process reward model 0.30" in fits.output
    crowded = checked(engine="vllm", gpu_memory_utilization=0.9)
    assert (
        crowded.exit_code == 2
        and "leave no room for keys and values of one row in 0.08 of" in crowded.output
    )
