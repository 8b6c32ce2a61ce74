"""Folders as strangers have them: loaded whole and right, or refused with the names of what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.models.headers import INDEX, WHOLE
from prefixrl.common.models.loading import check_model, load_model
from prefixrl.learner.check.loadable import check_weights
from support.models.base_models import edit
from support.models.tiny_model import save_model
from support.paths import EXAMPLE

Tensors = dict[str, torch.Tensor]
NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def change(folder: Path, by: Callable[[Tensors], Tensors]) -> None:
    """Write the weights of a folder anew."""
    save_file(by(load_file(folder / WHOLE)), folder / WHOLE, metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    """Split the weights of a folder over several files."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WHOLE).unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / INDEX).is_file()
    return sorted(folder.glob("model-*.safetensors"))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


def named(begin: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {begin + name: each for name, each in tensors.items()}


def with_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape, dtype=dtype)}


HEADERS_TELL: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "compiled": (
        named("_orig_mod."),
        r"names of a wrapper .* PEFT \(_orig_mod\): _orig_mod.lm_head.weight, .*",
    ),
    "data parallel": (
        named("module."),
        r"names of a wrapper .* PEFT \(module\): module.lm_head.weight",
    ),
    "peft": (
        named("base_model.model."),
        r"names of a wrapper .* PEFT \(base_model\): base_model.model.lm_head.wei",
    ),
    "fsdp": (
        named("_fsdp_wrapped_module."),
        r"names of a wrapper .* PEFT \(_fsdp_wrapped_module\)",
    ),
    "another wrapper": (
        named("policy."),
        r"no weights for lm_head.weight, .*random \(it has policy.lm_head.weight, ",
    ),
    "a norm is lost": (
        without(NORM),
        f"no weights for {NORM}, which would be random; save it again",
    ),
    "a head is lost": (
        without("lm_head.weight"),
        "no weights for lm_head.weight, which would be random",
    ),
    "a layer is lost": (
        lambda tensors: {name: each for name, each in tensors.items() if "layers.1" not in name},
        r"no weights for model.layers.1.input_layernorm.weight, .* and 8 more, which",
    ),
    "a value head": (
        with_tensor("v_head.weight", (1, 16)),
        "that would be left out: v_head.weight; is config.json",
    ),
    "a transposed one": (
        with_tensor(UP, (16, 24)),
        rf"{UP} has shape \(16, 24\), by config.json it is \(24, 16\)",
    ),
    "eight bits": (
        with_tensor(UP, (24, 16), torch.float8_e4m3fn),
        f"type F8_E4M3 and no quantization_config .*: {UP}; give",
    ),
}


@pytest.mark.parametrize("case", HEADERS_TELL)
def test_tensors_that_do_not_fit_the_architecture_are_named_before_any_is_read(
    case: str, folder: Path
) -> None:
    by, message = HEADERS_TELL[case]
    change(folder, by)
    for judge in (
        lambda: check_model(str(folder), "mine"),
        lambda: load_model(str(folder), "mine", "float32"),
    ):
        with pytest.raises(DataError, match=f"^mine.*{message}"):
            judge()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def low_rank(folder: Path) -> None:
    (folder / WHOLE).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: cut(folder / WHOLE, 0), r"model.safetensors is empty; copy it again"),
    "half the data": (
        lambda folder: cut(folder / WHOLE, 9000),
        r"model.safetensors cannot be read: .*; copy it again",
    ),
    "a pointer": (
        lambda folder: (folder / WHOLE).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        r"model.safetensors is a pointer of Git LFS, not the file; fetch it with `git lfs pull`",
    ),
    "a shard is missing": (
        lambda folder: shard(folder)[1].unlink(),
        r"1 of \d+ files that model.safetensors.index.json names are missing: model-00002-of-\d+.safetensors; copy",
    ),
    "no index": (
        lambda folder: [shard(folder), (folder / INDEX).unlink()],
        r"it has model-00001-.*, but neither",
    ),
    "pickled": (
        lambda folder: (folder / WHOLE).rename(folder / "pytorch_model.bin"),
        r"no weights that are read: pytorch_model.bin would have to be unpickled.*save it with save_pretrained",
    ),
    "low rank": (low_rank, r"low-rank adapter of another model; merge the two"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"is no model folder transformers can load",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(case: str, folder: Path) -> None:
    by, message = FILES[case]
    by(folder)
    with pytest.raises(DataError, match=f"^mine.*{message}"):
        check_model(str(folder), "mine")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_found_when_the_weights_are_read(
    value: float, folder: Path
) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors = {name: each.bfloat16() for name, each in tensors.items()}
        tensors[UP][1, 2] = value
        return tensors

    change(folder, spoil)
    check_model(str(folder), "mine")  # reads no weights
    with pytest.raises(
        DataError,
        match=rf"mine has weights that are no finite numbers \(NaN or infinite\): {UP}; it",
    ):
        load_model(str(folder), "mine", "float32")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("form", ["as saved", "sharded", "both heads", "without model."])
def test_whole_folders_are_loaded_with_every_value(
    is_tied: bool, form: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", is_tied=is_tied)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()  # type: ignore[no-untyped-call]
    if form == "sharded":
        shard(folder)
    if form == "both heads":
        change(
            folder,
            lambda tensors: (
                tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            ),
        )
    if form == "without model.":
        change(
            folder,
            lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()},
        )
    actual = load_model(str(folder), "mine", "float32").state_dict()
    assert actual.keys() == expected.keys()
    is_head_new = form == "both heads" and not is_tied
    assert all(
        torch.equal(actual[name], expected[name])
        for name in actual
        if not (is_head_new and name == "lm_head.weight")
    )


def test_a_quantised_model_cannot_be_trained_and_its_package_is_not_taken_for_attention(
    folder: Path,
) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        DataError,
        match=r"mine holds quantised weights \(gptq\), which new versions cannot replace: giv",
    ):
        check_model(str(folder), "mine", is_trained=True)
    check_model(str(folder), "mine")
    with pytest.raises(
        DataError, match=r"mine needs a package that is not installed here: .*optimum"
    ):
        load_model(str(folder), "mine", "float32", attention="sdpa")


def test_attention_that_is_not_here_is_blamed_on_its_key(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"learner.attn_implementation = 'flash_attention_2' is not available here: ",
    ):
        load_model(str(folder), "mine", "bfloat16", attention="flash_attention_2")


@pytest.mark.parametrize("section", ["adapter", "target"])
def test_check_refuses_what_headers_tell_and_names_the_key(section: str, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(EXAMPLE / section, tmp_path / "mine"))
    change(mine, without(NORM))
    fault = f"{section}.model = '{mine}' has no weights for {NORM}, which would be random"
    with pytest.raises(DataError, match=fault):
        check_weights(load(EXAMPLE / "run.toml", (f"{section}.model={mine}",)))


def test_a_model_that_brings_code_is_refused_without_advice_that_nobody_can_follow(
    folder: Path,
) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(
        DataError, match=r"mine needs code of its own .*auto_map.* never executed"
    ) as caught:
        check_model(str(folder), "mine")
    assert "trust_remote_code" not in str(caught.value)
