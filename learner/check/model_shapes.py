"""Shapes and sizes of models before they are loaded: from files, else from a known name."""

import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from prefixrl.common.config.foreign.files import read_json, read_toml
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.hub import cached_file
from prefixrl.common.models.headers import has_weights, tensor_headers
from prefixrl.learner.check.footprint import ModelShape

Size = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
LLAMA_LIKE = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
BIASED = {"Qwen2ForCausalLM", "Qwen2ForProcessRewardModel"}
_TABLE = read_toml(Path(__file__).with_name("shapes.toml"), "the table of shapes")
PUBLISHED = {name: ModelShape(*fields) for name, fields in _TABLE.items()}
"""Models that the recipes name, by the beginning of their hub name."""


def shape_of(model: str) -> ModelShape | None:
    """Return a model's shape; None for another architecture, or an unknown name."""
    path = cached_file(model, "config.json")
    if path is None:
        return _published(model)
    try:
        sizes = read_json(path, _Sizes)
    except ConfigError:
        return None  # sizes are left to the defaults of its family, or the file is no config: loading the model says so
    kinds = set(sizes.architectures or ())
    heads = sizes.num_attention_heads
    if not kinds & (LLAMA_LIKE | BIASED):
        return None
    return ModelShape(
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        intermediate=sizes.intermediate_size,
        heads=heads,
        kv_heads=sizes.num_key_value_heads or heads,
        head_size=sizes.head_dim or sizes.hidden_size // heads,
        vocabulary=sizes.vocab_size,
        is_tied=bool(sizes.tie_word_embeddings),
        is_biased=bool(kinds & BIASED),
    )


class _Sizes(msgspec.Struct):
    """The sizes in a config.json."""

    num_hidden_layers: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    architectures: tuple[str, ...] | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    tie_word_embeddings: bool | None = None


QUANTISED = re.compile(
    r"awq|gptq|fp8|nvfp4|mxfp4|gguf|bnb|int[48]|[348]-?bit|w\d+a\d+", re.IGNORECASE
)
"""Names of models whose weights are smaller than their number says."""


def parameters(model: str) -> tuple[int, str] | None:
    """Return a model's parameters and their origin: weights, config.json or name (7B, 0.5B).

    None where a hub name says neither the number nor the bits of a weight, and no config on this host tells.
    """
    if has_weights(model):
        headers = tensor_headers(model, model).values()
        return sum(math.prod(each.shape) for each in headers), "from its files"
    name = model.rsplit("/", 1)[-1]
    if QUANTISED.search(name):
        return None
    shape = _published(model)
    path = cached_file(model, "config.json")
    # A folder may be called like a model that it does not hold.
    if path is not None and (shape is None or os.path.isdir(model)):
        counted = _counted(str(path.parent))
        if counted is not None:
            return counted, "from its config.json"
    if shape is not None:
        return shape.parameters, "by its name"
    # Not the 7B of 8x7B, which is one expert of eight.
    size = re.search(r"(?<![\dx.])(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", name)
    if size is None:
        return None
    return int(float(size.group(1)) * {"B": 1e9, "M": 1e6}[size.group(2)]), "from its name"


def unknown_size(model: str) -> str:
    """Return the words for a model of which `parameters` tells nothing."""
    why = "neither its name nor a config.json in the hub's cache tells it"
    if os.path.isdir(model):
        why = f"{model} has no weights (*.safetensors) and no config.json that tells it"
    return f"its size is not known: {why}"


@cache
def _counted(folder: str) -> int | None:
    """Count the parameters of a folder's config.json; None if unknown, or quantised."""
    # Late: seconds of imports, where no header tells.
    from prefixrl.common.models.loading import quantisation, without_weights

    try:
        model = without_weights(folder, folder)
    except DataError:
        return None
    return None if quantisation(model.config) else sum(each.numel() for each in model.parameters())


def _published(model: str) -> ModelShape | None:
    name = model.rsplit("/", 1)[-1]
    for beginning, shape in PUBLISHED.items():
        if name == beginning or name.startswith(f"{beginning}-"):
            return shape
    return None
