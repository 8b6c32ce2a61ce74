"""Checksums of vLLM's parameters that follow from a snapshot. Pure.

vLLM fuses query, key and value, gate and up, and pads the vocabulary. A parameter in another layout (shards, packing)
shows itself at the start, when the weights are the folder's.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import torch
import xxhash

from prefixrl.common.weights.snapshot import as_bytes
from prefixrl.common.wire.messages.weights import EngineChecksum

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED_TO = 64
"""vLLM pads a vocabulary to a multiple of it, with zeros."""

Sums = Mapping[str, str]
"""Checksums by parameter, its name after `rank:`."""
Tensors = Mapping[str, torch.Tensor]


def following(parameter: str, tensors: Tensors, dtype: torch.dtype) -> set[str]:
    """Return the checksums that a parameter may have by these tensors, if it has a source."""
    name = parameter.rpartition(":")[2]
    stem, _, last = name.rpartition(".")
    parent, _, layer = stem.rpartition(".")
    sources = [f"{parent}.{each}.{last}" for each in FUSED.get(layer, ())] or [name]
    if any(each not in tensors for each in sources):
        return set()
    whole = torch.cat([tensors[each].to(dtype) for each in sources])
    padding = whole.new_zeros((-whole.shape[0] % PADDED_TO, *whole.shape[1:]))
    digests = {hashlib.sha256(as_bytes(whole)).hexdigest()}
    if len(padding) and layer in ("embed_tokens", "lm_head"):
        digests.add(hashlib.sha256(as_bytes(torch.cat([whole, padding]))).hexdigest())
    return digests


def known_layout(sums: Sums, initial: Tensors, dtype: torch.dtype) -> frozenset[str]:
    """Return the parameters that follow from the weights an engine was started with."""
    return frozenset(
        name for name, found in sums.items() if found in following(name, initial, dtype)
    )


def compared(
    sums: Sums, tensors: Tensors | None, followed: frozenset[str], dtype: torch.dtype
) -> EngineChecksum:
    """Return the checksum of all parameters, and whether those of `known` layout follow."""
    value = xxhash.xxh3_128()
    layout = xxhash.xxh3_64()
    for name in sorted(sums):
        value.update(f"{name}={sums[name]};".encode())
        layout.update(f"{name};".encode())
    origin: Literal["snapshot", "other", "unknown"] = "unknown"
    if tensors is not None:
        if any(sums[name] not in following(name, tensors, dtype) for name in followed):
            origin = "other"
        elif followed == sums.keys():
            origin = "snapshot"
    return EngineChecksum(value.hexdigest(), origin, layout=layout.hexdigest())
