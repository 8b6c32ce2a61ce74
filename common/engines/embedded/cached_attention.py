"""Attention of one new token per row over its cached keys and values, on a CPU; else `sdpa`.

Transformers repeats masked keys and values for every query head that shares them; here such heads are queries of one
head instead. In float32, products of matrices beat torch's own kernel (`benchmarks/decode_attention.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

NAME = "one_token"


def use_in(model: PreTrainedModel) -> None:
    """Let the layers of a model on a CPU, which use sdpa, decode by this attention."""
    AttentionInterface.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from queries (rows, heads, tokens, size) to keys; `options` are those of `sdpa`."""
    if query.shape[2] > 1 or attention_mask is None or attention_mask.shape[1] > 1:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return output
    return one_token(query, key, value, attention_mask, options["scaling"]), None


def one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attend from one token of each row; shapes as in `attention`."""
    rows, heads, _, size = query.shape
    groups = key.shape[1]
    grouped = query.view(rows, groups, heads // groups, size)
    if query.dtype != torch.float32:
        return scaled_dot_product_attention(grouped, key, value, mask, scale=scaling).view(
            rows, 1, heads, size
        )
    added = (
        torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
    )
    scores = torch.bmm(grouped.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(
        rows, groups, heads // groups, -1
    )
    weights = scores.mul_(scaling).add_(added).softmax(dim=-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(rows, 1, heads, size)
