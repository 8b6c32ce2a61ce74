"""SAPO (Gao et al. 2025, arXiv 2511.20347): a sigmoid of the ratio in place of the clip.

Far from ratio 1 the gradient fades instead of ending, faster for tokens of negative advantage.
"""

from torch import Tensor

POSITIVE, NEGATIVE = 1.0, 1.05
"""Temperatures of tokens of positive advantage, and of all others."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of sigmoid(t (theta/mu - 1)) 4/t A, and the sum of the gates, 4 s (1 - s), which are 1 at ratio 1."""
    t = POSITIVE + (NEGATIVE - POSITIVE) * (advantages <= 0).to(advantages.dtype)
    soft = (t * ((logprobs - behaviour).clamp(-20, 20).exp() - 1)).sigmoid()
    gates = (4 * soft * (1 - soft)).detach()
    return (-soft * 4 / t * advantages * mask).sum(), {"gate": (gates * mask).sum()}
