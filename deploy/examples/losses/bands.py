"""Bands on p/mu (IcePop, and its like for whole rows): what lies outside is left out of the loss.

Within the bands it is the decoupled loss: `algorithm.loss_function = ".../bands.py:loss"`. N counts
the tokens that are left out, too, as in verl and AReaL: a mask shortens the step. Entropy bonus and
KL act on every token.
"""

import torch
from torch import Tensor

TOKEN_BAND = (0.5, 2.0)
"""Range of p/mu of a token; None for all."""
ROW_BAND = (0.5, 2.0)
"""Range of the geometric mean of p/mu over a row; None for all."""
CLIP = 0.2
"""The ratio theta/p is clipped to [1 - CLIP, 1 + CLIP]."""
CAP = 2.0
"""Largest weight p/mu."""


def kept_tokens(proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens within both bands; a ratio that is no number does not count as outside."""
    logs = torch.where(mask, proximal - behaviour, 0.0)
    row_mean = logs.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    kept = mask
    for log_ratio, band in ((logs, TOKEN_BAND), (row_mean, ROW_BAND)):
        if band is not None:
            ratio = log_ratio.clamp(-20, 20).exp()
            kept = kept & ~((ratio < band[0]) | (ratio > band[1]))
    return kept


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of min(p/mu, CAP) times the clipped surrogate of theta/p within the bands."""
    kept = kept_tokens(proximal, behaviour, mask)
    ratio = (logprobs - proximal).clamp(-20, 20).exp()
    weight = (proximal - behaviour).clamp(-20, 20).exp().clamp(max=CAP)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    surrogate = torch.minimum(ratio * advantages, clipped)
    return -(weight * surrogate * kept).sum(), {"masked": (mask & ~kept).sum()}
