"""Off-policy sequence masking (DeepSeek-AI 2025, DeepSeek-V3.2): old rows are not pushed down.

A row of negative advantage that the policy has moved away from is left out of PPO's clipped loss:
`algorithm.loss_function = ".../opsm.py:loss"`. Not measured here.
"""

import torch
from torch import Tensor

BOUND = 0.1
"""Largest mean of log(mu/theta) over a row of negative advantage, in nats per token."""
CLIP = 0.2
"""The ratio theta/mu is clipped to [1 - CLIP, 1 + CLIP]."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of the clipped surrogate of all tokens but those of stale negatives."""
    log_ratio = ((logprobs - behaviour) * mask).clamp(-20, 20)
    row_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    row_mean = log_ratio.detach().sum(dim=1, keepdim=True) / row_tokens
    is_stale = (advantages < 0) & (-row_mean > BOUND)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(surrogate * ~is_stale * mask).sum(), {"stale": (is_stale & mask).sum()}
