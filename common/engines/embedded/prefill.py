"""The first forward of rows: their texts, each part that several share computed once.

    texts of a job   [question .......][prefix a]        heads  [question .......]     once per job
                     [question .......][prefix b]        tails  [prefix a]             once per different text
                     [question .......][prefix b]               [prefix b]

What the texts of a job have in common is a forward of its own where that saves a quarter of the tokens, and so is what
all texts, or all heads, have in common (worked examples, a system prompt). A model with sliding windows computes whole
texts, since the padding between head and tail would count as part of its window.
"""

from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from prefixrl.common.engines.embedded.row_cache import KeysAndValues
from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.evaluation.grouping import grouped

WORTH = 0.25
"""Least share of the tokens that heads of their own must save, since they are one more forward."""


class Prefilled(NamedTuple):
    """Keys and values of texts, and the logits of what follows them."""

    layers: list[KeysAndValues]
    mask: Tensor
    """Tokens apart from padding, shape (different texts, columns); every row ends with the last column."""
    logits: Tensor
    """Logits of the token after each text, shape (different texts, vocabulary)."""
    source: list[int]
    """Row of these tensors that holds each text of the call."""


def prefill(
    model: PreTrainedModel, texts: Sequence[TokenIds], jobs: Sequence[Hashable], may_split: bool
) -> Prefilled:
    """Compute texts; those of one job may have a head in common, and heads one too."""
    rows: dict[bytes, int] = {}
    source = [rows.setdefault(text.tobytes(), len(rows)) for text in texts]
    first = [source.index(row) for row in range(len(rows))]
    cache, mask, logits = _filled(
        model, [texts[place] for place in first], [jobs[place] for place in first], may_split
    )
    return Prefilled([(keys, values) for keys, values, _ in cache], mask, logits, source)


def _filled(
    model: PreTrainedModel, texts: Sequence[TokenIds], jobs: Sequence[Hashable], may_split: bool
) -> tuple[DynamicCache, Tensor, Tensor]:
    """Return the cache of texts, its mask and the logits after each, as in `Prefilled`."""
    sizes = head_sizes(texts, jobs) if may_split else [0] * len(texts)
    cache = DynamicCache()
    device = model.device
    mask = torch.zeros(len(texts), 0, dtype=torch.bool, device=device)
    if any(sizes):
        # Heads are filled in the same way, since all of them may begin alike.
        heads: dict[bytes, int] = {}
        head_of = [
            heads.setdefault(text[:size].tobytes(), len(heads))
            for text, size in zip(texts, sizes, strict=True)
        ]
        begun = [np.frombuffer(head, np.int32) for head in heads]
        cache, head_mask, _ = _filled(model, begun, [None] * len(begun), may_split)
        index = torch.tensor(head_of, device=device)
        # A copy of its head for every text.
        cache.batch_select_indices(index)
        mask = head_mask[index]
    ids, tail_mask = padded([text[size:] for text, size in zip(texts, sizes, strict=True)], device)
    # A tail goes on where its head ends; padding takes no position.
    positions = (tail_mask.cumsum(-1) - 1).clamp(min=0) + torch.tensor(
        sizes, device=device
    ).unsqueeze(1)
    mask = torch.cat([mask, tail_mask], dim=1)
    return cache, mask, _forward(model, ids, mask, positions, cache)


def head_sizes(texts: Sequence[TokenIds], jobs: Sequence[Hashable]) -> list[int]:
    """Return the tokens of each text to compute once, for its job or for all; 0 where that saves little."""
    heads = (_common_heads(texts, keys) for keys in (jobs, [None] * len(texts)))
    saved, sizes = max(heads, key=itemgetter(0))
    return sizes if saved >= WORTH * sum(text.size for text in texts) else [0] * len(texts)


def _common_heads(texts: Sequence[TokenIds], keys: Sequence[Hashable]) -> tuple[int, list[int]]:
    """Return the tokens saved by heads common to the texts of a key, and the size of each text's head."""
    sizes = [0] * len(texts)
    saved = 0
    for places in grouped(zip(keys, range(len(texts)), strict=True)).values():
        size = _common([texts[place] for place in places]) if len(places) > 1 else 0
        saved += size * (len(places) - 1)
        for place in places:
            sizes[place] = size
    return saved, sizes


def _common(texts: Sequence[TokenIds]) -> int:
    """Return the number of first tokens that texts have in common; one at least is left of each."""
    least = max(0, min(text.size for text in texts) - 1)
    table = np.stack([text[:least] for text in texts])
    differ = (table != table[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else least


def padded(texts: Sequence[TokenIds], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and mask of texts, padded on the left, shape (texts, longest)."""
    longest = max(text.size for text in texts)
    ids = np.zeros((len(texts), longest), dtype=np.int64)
    mask = np.zeros((len(texts), longest), dtype=bool)
    for row, text in enumerate(texts):
        ids[row, longest - text.size :] = text
        mask[row, longest - text.size :] = True
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _forward(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: Cache,
) -> Tensor:
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        # An index, which copies the last states. Their slice is not contiguous: its product with the output layer is
        # a batched one, which is slower, and on CPUs with units for bfloat16 copies that layer once per row.
        logits_to_keep=torch.tensor([-1], device=ids.device),
    )
    logits: Tensor = output.logits[:, -1]
    return logits
