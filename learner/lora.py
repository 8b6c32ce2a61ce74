"""Low-rank adaptation (Hu et al. 2021): a frozen weight W acts as W + alpha / rank * B A, and only A and B are trained.

peft puts the matrices into the model's linear layers; what leaves the learner is merged, under the names the model always had.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefixrl.common.errors import ConfigError
from prefixrl.common.learner_section import LoraConfig

FROZEN, FIRST, SECOND = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def add(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Freeze the model and give its linear layers matrices whose product is 0 at first; the same on every rank.

    Raises:
        ConfigError: `target_modules` names no linear layer of this model.
    """
    names = settings.target_modules
    peft = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=names[0] if names == ("all-linear",) else list(names),
    )
    dtype = model.dtype
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
    nn.Module.to(model, dtype)
    _check_targets(model, list(names))


def _check_targets(model: PreTrainedModel, names: list[str]) -> None:
    """What is no linear layer, or shares its weight with the embedding, could not be merged into one published weight."""
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"learner.lora.target_modules = {names}: {name} is a {type(layer.get_base_layer()).__name__}, not a linear "
                "layer; leave it out"
            )
        if is_tied and layer is model.get_output_embeddings():
            raise ConfigError(
                f"learner.lora.target_modules = {names}: {name} shares its weight with the embedding; leave it out"
            )


def merged(tensors: Mapping[str, Tensor], settings: LoraConfig) -> dict[str, Tensor]:
    """A model's weights under their own names, each low-rank product added to its frozen weight in fp32."""
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
    """The model as it was before `add`. Not peft's own switch, which turns gradients off and on as well."""
    layers = [each for each in module.modules() if isinstance(each, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
