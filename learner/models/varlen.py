"""Attention over packed rows of several lengths: torch's own kernel on CUDA in 16 bits, else row by row.

Transformers calls it as `attn_implementation = "varlen"`, and gives it where the packed rows begin.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "varlen"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def row_offsets(mask: Tensor) -> dict[str, Any]:
    """Return where rows begin and end, packed by a mask (rows, width), under the names that transformers passes on."""
    lengths = mask.sum(1, dtype=torch.int32)
    lengths = lengths[lengths > 0]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each packed row, or each of (rows, heads, tokens, size) without `cu_seq_lens_q`.

    Queries, keys and values are (1, heads, tokens, size); `options` are those of `row_offsets` and transformers' own.
    """
    other = [
        name
        for name in ("softcap", "s_aux", "position_bias", "cache")
        if options.get(name) is not None
    ]
    # Refused, not ignored: the logprobs would be those of another model.
    if other or attention_mask is not None or options.get("dropout"):
        raise ValueError(
            f'learner.attn_implementation = "varlen" does not serve {type(module).__name__}, which needs '
            f"{', '.join(other) or 'a mask or dropout'}; use sdpa"
        )
    window, scale = options.get("sliding_window"), options.get("scaling")
    ends = options.get("cu_seq_lens_q")
    if ends is None:  # rows that are not packed, of one length
        return _one_row(query, key, value, scale, window).transpose(1, 2).contiguous(), None
    if query.device.type == "cuda" and query.dtype in KERNEL_DTYPES:
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        window_size = (window - 1, 0) if window else (-1, 0)
        longest = options["max_length_q"]
        attended = varlen_attn(
            q,
            k,
            v,
            ends,
            ends,
            longest,
            longest,
            scale=scale,
            window_size=window_size,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(attended, Tensor)
        return attended[None], None
    # Elsewhere torch has no such kernel: each packed row attends for itself.
    rows = [
        _one_row(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale, window)
        for a, b in pairwise(ends.tolist())
    ]
    return torch.cat(rows, 2).transpose(1, 2).contiguous(), None


def _one_row(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    width, is_grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or width <= window:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    is_visible = (
        torch.ones(width, width, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    )
    return scaled_dot_product_attention(
        query, key, value, is_visible, scale=scale, enable_gqa=is_grouped
    )


AttentionInterface.register(NAME, varlen_attention)
