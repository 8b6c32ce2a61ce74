"""Sizes of models whose weights are not here: counted by a config.json, or not known, in words that are true."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import GPT2Config, GPT2LMHeadModel

from prefixrl.common.config.load import load
from prefixrl.learner.__main__ import main
from prefixrl.learner.check.model_shapes import parameters, shape_of, unknown_size
from prefixrl.learner.check.report import forecast
from support.paths import EXAMPLE, EXAMPLES

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
QWEN_PARAMETERS = 1_543_714_304
REMOTE = {
    "model_type": "mine",
    "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
}
CODE = "raise SystemExit('executed')"


def folder_of(path: Path, config: object) -> Path:
    """A model folder with nothing but a config.json."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_folder_without_weights_has_the_parameters_of_its_config(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mine", QWEN)
    assert parameters(str(folder)) == (QWEN_PARAMETERS, "from its config.json")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-7B", (7_615_616_512, "by its name")),
        ("org/a-7B", (7e9, "from its name")),
        ("Qwen/Qwen2.5-1.5B-Instruct", (QWEN_PARAMETERS, "by its name")),
        ("org/model", None),
        ("someone/Model-0.5B-Instruct", (5e8, "from its name")),
        # Names that do not tell the bits of a weight, or the experts.
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", None),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", None),
        ("RedHatAI/Llama-3.1-70B-Instruct-FP8", None),
        ("unsloth/Llama-3.1-8B-bnb-4bit", None),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", None),
    ],
)
def test_a_hub_name_tells_the_size_or_nothing_does(
    name: str, known: tuple[float, str] | None
) -> None:
    assert parameters(name) == known


@pytest.mark.parametrize("model", ["arithmetic/adapter", "arithmetic/target", "letters/target"])
def test_a_config_tells_what_the_weights_beside_it_have(model: str, tmp_path: Path) -> None:
    with_weights, bare = EXAMPLES / model, tmp_path / "bare"
    shutil.copytree(with_weights, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    counted, _ = parameters(str(bare)) or (0, "")
    assert parameters(str(with_weights)) == (counted, "from its files")
    shape = shape_of(str(with_weights))
    assert shape is not None and shape.parameters == counted


def test_a_model_of_another_family_is_counted_too(tmp_path: Path) -> None:
    shape = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=64)
    shape.save_pretrained(tmp_path / "gpt")
    count = sum(each.numel() for each in GPT2LMHeadModel(shape).parameters())
    assert parameters(str(tmp_path / "gpt")) == (count, "from its config.json")


def test_a_folder_is_what_its_config_says_whatever_it_is_called(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "Qwen2.5-7B", QWEN | {"num_hidden_layers": 1})
    count, origin = parameters(str(folder)) or (0, "")
    assert origin == "from its config.json" and count < QWEN_PARAMETERS
    assert parameters(str(tmp_path / "away" / "Qwen2.5-7B")) == (7_615_616_512, "by its name")


def test_a_hub_name_that_tells_nothing_is_counted_by_the_config_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--model"
    folder_of(repository / "snapshots" / "0123", QWEN)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert (parameters("org/model"), parameters("org/other")) == (
        (QWEN_PARAMETERS, "from its config.json"),
        None,
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        "no json",
        {"model_type": "nobodys"},
        {"model_type": "t5"},
        REMOTE,
        QWEN | {"hidden_size": "large"},
        QWEN | {"num_attention_heads": 0},
        QWEN | {"quantization_config": {"quant_method": "awq", "bits": 4}},
    ],
)
def test_a_config_that_does_not_tell_is_no_fault_and_executes_nothing(
    config: object, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "mine", config)
    (folder / "code.py").write_text(CODE)
    assert parameters(str(folder)) is None
    assert shape_of(str(folder)) is None or "quantization_config" in str(config)


def test_heads_of_keys_and_values_that_are_null_are_as_many_as_those_of_queries(
    tmp_path: Path,
) -> None:
    shape = shape_of(str(folder_of(tmp_path / "mine", QWEN | {"num_key_value_heads": None})))
    assert shape is not None and shape.kv_heads == shape.heads


def test_a_config_that_leaves_sizes_to_its_family_has_parameters_and_no_shape(
    tmp_path: Path,
) -> None:
    folder = folder_of(
        tmp_path / "mine", {key: QWEN[key] for key in ("architectures", "model_type")}
    )
    assert shape_of(str(folder)) is None and parameters(str(folder)) is not None


def test_check_plans_the_memory_of_an_adapter_of_which_only_the_config_is_here_and_refuses_it(
    tmp_path: Path,
) -> None:
    flags = ["--set", f"adapter.model={folder_of(tmp_path / 'mine', QWEN)}", "--check"]
    code, said = (
        (done := CliRunner().invoke(main, [str(EXAMPLE / "run.toml"), *flags])).exit_code,
        done.output,
    )
    assert (
        code == 2
        and "/mine' has no weights that are read: it has neither model.safetensors nor " in said
    )
    assert "adapter: 1,543.7 M parameters (from its config.json)" in said
    assert (
        f"{QWEN_PARAMETERS * (2 * 16 + 4) / 2**30:.2f} GiB  states (2 trained with optimiser, reference)"
        in said
    )
    assert f"a rollout: {QWEN_PARAMETERS * 4 / 2**30:.2f} GiB of weights" in said


def test_what_is_not_known_is_not_said_to_wait_for_a_download_of_a_local_folder(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path / "mine", {})
    said = forecast(
        load(EXAMPLE / "run.toml", (f"adapter.model={folder}", "target.model=org/model"))
    ).text
    assert (
        f"adapter: its size is not known: {folder} has no weights (*.safetensors) and no config.json that"
        in said
    )
    assert f"a rollout's model: {unknown_size(str(folder))}" in said and "download" not in said
    assert (
        "target: its size is not known: neither its name nor a config.json in the hub's cache tells it"
        in said
    )


def test_low_rank_matrices_are_counted_where_the_config_is_here(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mine", QWEN)
    said = forecast(
        load(EXAMPLE / "run.toml", (f"adapter.model={folder}", "learner.lora={rank=4}"))
    ).text
    # Rank 4: in each of 28 layers q and o, k and v, gate, up and down, for actor and critic; and the critic's head.
    layer = 2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960)
    assert (
        f"2 frozen, {2 * 4 * 28 * layer + 1536:,} low-rank and head parameters with optimiser"
        in said
    )
