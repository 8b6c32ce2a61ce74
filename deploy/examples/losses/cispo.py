"""CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4 and 5): the importance weight is clipped and held constant.

Every token keeps its gradient, also where its ratio is far out: `algorithm.loss_function = ".../cispo.py:loss"`.
"""

from torch import Tensor

HIGH = 5.0
"""Largest weight, as in ScaleRL (arXiv 2510.13786) and TRL's `epsilon_high`; there is no lower bound."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of sg(min(theta/mu, HIGH)) A log theta, and the tokens whose weight was clipped."""
    ratio = (logprobs - behaviour).clamp(-20, 20).exp().detach()
    per_token = -ratio.clamp(max=HIGH) * advantages * logprobs
    return (per_token * mask).sum(), {"clipped": ((ratio > HIGH) & mask).sum()}
