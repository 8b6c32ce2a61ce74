"""The one way in which every process loads a model: every weight comes from a file.

transformers makes up what a folder lacks and only warns. Here names and shapes are compared before any weight is read,
by transformers' own rules (ties, conversions of names), with tensors that have no data; then all must be finite.
"""

import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.models.headers import some_names, tensor_headers

Kind = Literal["causal", "backbone"]
"""causal: a language model. backbone: a model without its head; a process reward model has its own."""
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
HEADS = ("score", "classifier", "lm_head")
"""First parts of the names of heads."""
_AROUND = (
    "_orig_mod",
    "module",
    "base_model",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)
"""Parts of names that wrappers of a model add."""
_AUTO: dict[Kind, Any] = {"causal": AutoModelForCausalLM, "backbone": AutoModel}
_TOLD: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
_BEHIND_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Keys of a config that cap or scale logits: the learner computes them by the linear layer alone."""
_FLOATS = ("F64", "F32", "F16", "BF16")


def without_weights(folder: str, called: str, kind: Kind = "causal") -> PreTrainedModel:
    """Return a folder's model on torch's meta device, with its config, executing none of its code; DataError."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = _AUTO[kind].from_config(config, trust_remote_code=False)
    except Exception as error:  # an unchecked config fails in ways of its own
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{called} needs code of its own folder or of the hub (auto_map in its config.json), which is never "
                f"executed here: give a model of an architecture that transformers has"
            ) from error
        raise DataError(f"{called} is no model folder transformers can load: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def quantisation(config: PretrainedConfig) -> str:
    """Return the method by which a model's weights are quantised; "" where they are not."""
    quantised = getattr(config, "quantization_config", None)
    return str(
        quantised.get("quant_method", quantised)
        if isinstance(quantised, Mapping)
        else quantised or ""
    )


def check_model(
    folder: str, called: str, kind: Kind = "causal", is_trained: bool = False
) -> PretrainedConfig:
    """Return a folder's config; DataError unless it has each weight of its architecture, in its shape, and no other.

    Only headers are read. Quantised weights have names of their own: their files are checked alone.
    """
    headers = tensor_headers(folder, called)
    model = without_weights(folder, called, kind)
    if method := quantisation(model.config):
        if is_trained:
            raise DataError(
                f"{called} holds quantised weights ({method}), which new versions cannot replace: give the model that "
                f"was quantised, in bfloat16 or float32; only a frozen target may be quantised"
            )
        return model.config
    for key in _BEHIND_HEAD if is_trained else ():
        if (value := getattr(model.config, key, None)) not in (None, 1.0):
            raise DataError(
                f"{called} does more to its logits than one linear layer ({key} = {value:g} in its config.json): only "
                f"a frozen target may"
            )
    # transformers itself compares names and shapes, with tensors that hold no data.
    architecture: Any = type(model)
    tensors = {name: torch.empty(each.shape, device="meta") for name, each in headers.items()}
    with _quiet():
        _, info = architecture.from_pretrained(
            None, config=model.config, state_dict=tensors, device_map="meta", **_TOLD
        )
    _refuse(info, called, kind)
    # Integers without a quantization_config have no meaning that a file states.
    narrow = sorted(
        name
        for name, each in headers.items()
        if name.endswith("weight") and each.dtype not in _FLOATS
    )
    if narrow:
        raise DataError(
            f"{called} has weights of type {headers[narrow[0]].dtype} and no quantization_config in its config.json "
            f"that says how to read them: {some_names(narrow)}; give the folder with it, or the model in bfloat16"
        )
    return model.config


def load_model(
    folder: str,
    called: str,
    dtype: Dtype,
    kind: Kind = "causal",
    attention: str | None = None,
    is_trained: bool = False,
) -> PreTrainedModel:
    """Return a model on the CPU, ready to run.

    Raises DataError like `check_model`, and for NaN or infinite weights.

    ConfigError: the `attention` of learner.attn_implementation is not available here.
    """
    check_model(folder, called, kind, is_trained)
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        with _quiet():
            model, info = _AUTO[kind].from_pretrained(
                folder, dtype=chosen, use_safetensors=True, **_TOLD, **options
            )
    except ImportError as error:
        # The package of an attention kernel, or a package of the model?
        raisers = " ".join(frame.name for frame in traceback.extract_tb(error.__traceback__))
        if attention and ("attn" in raisers or "attention" in raisers):
            raise ConfigError(
                f"learner.attn_implementation = {attention!r} is not available here: {error}; use sdpa or auto"
            ) from error
        raise DataError(f"{called} needs a package that is not installed here: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{called} is no model folder transformers can load: {error}") from error
    assert isinstance(model, PreTrainedModel)
    # Again: the data of a file may not be what its header says.
    _refuse(info, called, kind)
    if wrong := [name for name, each in model.named_parameters() if not _is_finite(each.data)]:
        raise DataError(
            f"{called} has weights that are no finite numbers (NaN or infinite): {some_names(wrong)}; it was saved "
            f"after training had failed, or its file is damaged: take an earlier checkpoint, or copy it again"
        )
    model.eval()
    return model


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.element_size() < 2:
        return True  # packed by a quantiser
    low, high = torch.aminmax(tensor)  # both NaN where one value is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _refuse(info: Mapping[str, Any], called: str, kind: Kind) -> None:
    """Raise DataError for tensors that do not fit the architecture, with their names."""
    missing = sorted(info["missing_keys"])
    extra = sorted(info["unexpected_keys"])
    if kind == "backbone":
        # A backbone is loaded without a head, so the folder's heads are left out on purpose.
        extra = [name for name in extra if name.split(".")[0] not in HEADS]
    # First: renamed tensors are both missing and left over, and either message would mislead.
    for part in _AROUND:
        renamed = [name for name in extra if part in name.split(".")]
        if missing and renamed:
            raise DataError(
                f"{called} has names of a wrapper such as torch.compile, FSDP or PEFT ({part}): {some_names(renamed)}; "
                f"save the model inside it with save_pretrained"
            )
    if missing:
        beside = f" (it has {some_names(extra)}, which the architecture has not)" if extra else ""
        raise DataError(
            f"{called} has no weights for {some_names(missing)}, which would be random{beside}; save it again"
        )
    if extra:
        raise DataError(
            f"{called} has weights that its architecture has not, and that would be left out: {some_names(extra)}; is "
            f"config.json that of this model? If they are not needed, save the model without them"
        )
    if wrong := sorted(info["mismatched_keys"]):
        name, shape, expected = wrong[0]
        more = f", and {len(wrong) - 1} others differ too" if len(wrong) > 1 else ""
        raise DataError(
            f"{called}: {name} has shape {tuple(shape)}, by config.json it is {tuple(expected)}{more}; is config.json "
            f"that of this model?"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out transformers' own report of a load, which errors here replace, and its progress bar."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
