"""One run of a model's backbone over a micro-batch: shared prompts, packed rows, attention.

A line holds one prompt and the rows of a group that continue it: each row sees the prompt and itself, and its positions
go on after the prompt's. So the prompt is computed once for all its rows.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixrl.learner.models import varlen

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative distance of hidden states up to which two forms are the same function."""


def hidden_at_actions(backbone: Any, batch: dict[str, Tensor], is_packed: bool) -> Tensor:
    """Run the backbone and return its output where the actions are predicted, (actions, hidden)."""
    ids, mask, positions = (batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    places = batch["actions"]
    if is_packed:
        # Without a mask, transformers separates rows where positions begin at 0 again.
        is_token = mask.bool()
        offsets = (
            varlen.row_offsets(is_token)
            if backbone.config._attn_implementation == varlen.NAME
            else {}
        )
        out = backbone(
            input_ids=ids[is_token][None],
            position_ids=positions[is_token][None],
            use_cache=False,
            **offsets,
        )
        # Places among the tokens alone, since padding was left out.
        places = (is_token.flatten().cumsum(0) - 1)[places]
    else:
        visible_mask = attention_mask(batch["segments"], backbone) if "segments" in batch else mask
        out = backbone(
            input_ids=ids, attention_mask=visible_mask, position_ids=positions, use_cache=False
        )
    hidden: Tensor = out.last_hidden_state.flatten(0, 1).index_select(0, places)
    return hidden


def attention_mask(segments: Tensor, backbone: Any) -> Tensor:
    """Return (lines, 1, width, width): a position sees the prompt and its own row, up to itself."""
    is_visible = visible(segments)[:, None]
    if backbone.config._attn_implementation != "eager":
        return is_visible
    lowest = torch.finfo(backbone.dtype).min
    return torch.zeros(
        is_visible.shape, dtype=backbone.dtype, device=is_visible.device
    ).masked_fill(~is_visible, lowest)


def visible(segments: Tensor) -> Tensor:
    """Return True where position i of a line sees position j, (lines, i, j); -1 is a segment of padding."""
    of_query, of_key = segments[:, :, None], segments[:, None, :]
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    return causal & ((of_key == 0) | (of_key == of_query))


def spread_over_rows(values: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Put a value per action at its place in (rows, tokens); 0 elsewhere."""
    tokens = batch["tokens"]
    spread = values.new_zeros(tokens.numel()).index_copy(0, batch["cells"], values)
    return spread.view(tokens.shape)


@torch.no_grad()
def takes_shared_prompts(model: PreTrainedModel) -> bool:
    """Return True if two rows after one prompt come out of this model as each row alone.

    Sliding windows, state spaces and positions counted by the mask do not; the log says so.
    """
    shape = model.config.get_text_config()
    kinds = set(getattr(shape, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(shape, "sliding_window", None):
        what = ", ".join(sorted(kinds)) or "a sliding window"
        logger.warning("%s has %s: every row carries its prompt", type(model).__name__, what)
        return False
    # A trial: two rows after one prompt, each alone and then both in one line.
    ids = torch.arange(8, device=model.device).remainder(shape.vocab_size)
    prompt, rows = ids[:3], (ids[3:6], ids[6:])
    alone = [_last(model, torch.cat([prompt, row])[None], {})[3:] for row in rows]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]], device=model.device)
    # The second row goes on after the prompt, as if the first were not there.
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]], device=model.device)

    def with_shared_prompt() -> Tensor:
        mask = attention_mask(segments, model.get_decoder())
        return _last(model, ids[None], {"attention_mask": mask, "position_ids": positions})[3:]

    return _is_equal(
        model,
        with_shared_prompt,
        lambda: torch.cat(alone),
        "a mask of its rows, so that every row carries its prompt",
    )


@torch.no_grad()
def serves_packed_rows(model: PreTrainedModel) -> bool:
    """Return True if this model's attention, on this device and in its type, computes packed rows as each row alone."""
    ids = torch.arange(8, device=model.device).remainder(model.config.get_text_config().vocab_size)
    rows = (ids[:5], ids[5:])
    mask = torch.arange(5, device=model.device) < torch.tensor([[5], [3]], device=model.device)
    positions = torch.cat([torch.arange(len(row), device=model.device) for row in rows])[None]

    def packed() -> Tensor:
        return _last(model, ids[None], {"position_ids": positions, **varlen.row_offsets(mask)})

    def alone() -> Tensor:
        return torch.cat([_last(model, row[None], {}) for row in rows])

    return _is_equal(model, packed, alone, "attention over packed rows")


def _last(model: PreTrainedModel, ids: Tensor, options: dict[str, Any]) -> Tensor:
    hidden: Tensor = (
        model.get_decoder()(input_ids=ids, use_cache=False, **options).last_hidden_state[0].float()
    )
    return hidden


def _is_equal(
    model: PreTrainedModel, form: Callable[[], Tensor], alone: Callable[[], Tensor], what: str
) -> bool:
    """Return True if another form of a forward has the expected outcome; log why not."""
    try:
        expected = alone()
        gap = float((form() - expected).norm() / expected.norm())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        logger.warning("%s does not serve %s: %s", type(model).__name__, what, error)
        return False
    if gap >= TOLERANCE[model.dtype]:
        logger.warning(
            "%s does not serve %s: it is off by %.2g here", type(model).__name__, what, gap
        )
    return gap < TOLERANCE[model.dtype]
