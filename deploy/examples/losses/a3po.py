"""A-3PO (Li et al. 2025, arXiv 2512.06547): the proximal policy is interpolated, not measured.

log p = log mu + (log theta - log mu) a / (a + 1) at age a, since p is one version behind theta, and
mu is a + 1 behind: `algorithm.loss_function = ".../a3po.py:loss"`. The learner may measure its own p
beside it; with `kl = 0` the first minibatch of an iteration costs no forward for that.
"""

import torch
from torch import Tensor

CLIP = 0.2
"""The ratio theta/p is clipped to [1 - CLIP, 1 + CLIP]."""
CAP = 2.0
"""Largest weight p/mu."""


def loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ages: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of min(p/mu, CAP) times the clipped surrogate of theta/p."""
    share = ages.to(behaviour.dtype) / (ages + 1)
    interpolated = behaviour + share * (logprobs.detach() - behaviour)
    ratio = (logprobs - interpolated).clamp(-20, 20).exp()
    weight = (interpolated - behaviour).clamp(-20, 20).exp().clamp(max=CAP)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    surrogate = torch.minimum(ratio * advantages, clipped)
    return -(weight * surrogate * mask).sum(), {"weight": (weight * mask).sum()}
