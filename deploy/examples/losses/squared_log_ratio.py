"""prime-rl's default loss of August 2026: DPPO's mask by probabilities, and a squared log ratio that pulls back to mu.

DPPO: Qi et al. 2026, arXiv 2602.04879. The square: Kimi K2.5, arXiv 2602.02276.
"""

from torch import Tensor

BOUND = 0.2
"""A token whose probability went further than this from mu's, the way it is pushed, has no surrogate."""
PULL = 1e-3
"""Coefficient of (log theta/mu)^2, prime-rl's `kl_tau`; masked tokens are pulled back, too."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of A theta/mu where the probability is within the bound, plus PULL (log theta/mu)^2 everywhere."""
    log_ratio, moved = logprobs - behaviour, logprobs.exp() - behaviour.exp()
    outside = ((advantages > 0) & (moved > BOUND)) | ((advantages <= 0) & (moved < -BOUND))
    surrogate = log_ratio.clamp(-20, 20).exp() * advantages * ~outside
    sums = {"outside": (outside & mask).sum(), "square": (log_ratio.detach().square() * mask).sum()}
    return ((PULL * log_ratio.square() - surrogate) * mask).sum(), sums
