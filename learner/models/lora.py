"""LoRA (Hu et al. 2021): W acts as W + alpha / rank * B A; peft makes A and B, which alone are trained."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.errors import ConfigError

FROZEN, FIRST, SECOND = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def add(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Freeze the model; give its linear layers matrices with product 0, equal on every rank; raise ConfigError."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names = settings.target_modules
    peft = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=names[0] if names == ("all-linear",) else list(names),
    )
    dtype = model.dtype
    # A seed of their own: every rank draws the same matrices, and no other draw changes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # peft warns of tied weights, which are refused below.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                inject_adapter_in_model(peft, model)
        except ValueError as error:
            ends = sorted(
                {
                    name.rpartition(".")[2]
                    for name, each in model.named_modules()
                    if isinstance(each, nn.Linear)
                }
            )
            raise ConfigError(
                f"learner.lora.target_modules = {list(names)}: {error}; the linear layers of this model end in {ends}"
            ) from None
    # New layers may be float32: they get the model's type, as every other parameter has.
    nn.Module.to(model, dtype)
    _check_targets(model, list(names))


def is_low_rank(layer: object) -> bool:
    """Return True for a layer with low-rank matrices."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(layer, tuners.BaseTunerLayer)


def _check_targets(model: PreTrainedModel, names: list[str]) -> None:
    """Refuse modules that cannot be merged: not linear, or tied to the embedding."""
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    low_rank: list[tuple[str, Any]] = [
        each for each in model.named_modules() if is_low_rank(each[1])
    ]
    for name, layer in low_rank:
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"learner.lora.target_modules = {names}: {name} is a {type(layer.get_base_layer()).__name__}, not a "
                f"linear layer; leave it out"
            )
        if is_tied and layer is model.get_output_embeddings():
            raise ConfigError(
                f"learner.lora.target_modules = {names}: {name} shares its weight with the embedding; leave it out"
            )


def merged(tensors: Mapping[str, Tensor], settings: LoraConfig) -> dict[str, Tensor]:
    """Return the weights under the model's own names, low-rank products added in fp32."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        if name.endswith(FROZEN):
            stem = name.removesuffix(FROZEN)
            product = tensors[stem + SECOND].float() @ tensors[stem + FIRST].float()
            tensor = (tensor.float() + settings.alpha / settings.rank * product).to(tensor.dtype)
        whole[name.replace(".base_layer.", ".")] = tensor
    return whole


@contextmanager
def disabled(module: nn.Module) -> Iterator[None]:
    """Switch the low-rank matrices off; peft's own switch would change `requires_grad` too."""
    layers: list[Any] = [each for each in module.modules() if is_low_rank(each)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
