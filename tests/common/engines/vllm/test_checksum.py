"""Checksums of fused and padded parameters follow from a snapshot; one of an unknown layout is known as such."""

import hashlib

import torch

from prefixrl.common.engines.vllm.checksum import compared, following, known_layout
from prefixrl.common.weights.snapshot import as_bytes

TENSORS = {
    "model.embed_tokens.weight": torch.randn(40, 8),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8),
    "model.layers.0.self_attn.k_proj.weight": torch.randn(4, 8),
    "model.layers.0.self_attn.v_proj.weight": torch.randn(4, 8),
    "model.norm.weight": torch.randn(8),
}
QKV = "tp0:model.layers.0.self_attn.qkv_proj.weight"


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(as_bytes(tensor))).hexdigest()


def parameters(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, str]:
    """As an engine holds them: the vocabulary padded to 64, query, key and value in one."""
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    padded = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(24, 8)])
    held = {
        "tp0:model.embed_tokens.weight": padded,
        QKV: torch.cat([tensors[name] for name in names]),
        "tp0:model.norm.weight": tensors["model.norm.weight"],
    }
    return {name: digest(tensor.to(dtype)) for name, tensor in held.items()}


def test_what_an_engine_fuses_pads_and_casts_follows_from_the_snapshot() -> None:
    sums = parameters(TENSORS, torch.bfloat16)
    known = known_layout(sums, TENSORS, torch.bfloat16)
    assert known == sums.keys()
    moved = {name: tensor + 0.1 for name, tensor in TENSORS.items()}
    assert compared(sums, moved, known, torch.bfloat16).follows == "other", "it kept what it had"
    right = compared(parameters(moved, torch.bfloat16), moved, known, torch.bfloat16)
    assert right.follows == "snapshot"
    assert right.value != compared(sums, None, known, torch.bfloat16).value


def test_a_parameter_of_another_layout_is_compared_by_nobody() -> None:
    sums = parameters(TENSORS, torch.float32) | {QKV: "packed"}
    known = known_layout(sums, TENSORS, torch.float32)
    assert known == sums.keys() - {QKV}
    assert compared(sums, TENSORS, known, torch.float32).follows == "unknown"
    assert (
        compared(sums | {"tp0:model.norm.weight": "old"}, TENSORS, known, torch.float32).follows
        == "other"
    )
    assert not following("tp0:model.layers.0.mlp.experts.w13_weight", TENSORS, torch.float32)
