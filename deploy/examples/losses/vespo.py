"""VESPO (arXiv 2602.10693): a smooth weight of the whole row, from its ratio theta/mu.

phi(w) = w^k e^(k' (1 - w)): 1 at w = 1, falling on both sides, so that old rows fade and none is cut.
"""

import math

from torch import Tensor

POSITIVE, NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""k and k' of rows of advantage 0 and above, and of all others; TRL's defaults."""
LOWEST, HIGHEST = math.log(1e-8), 20.0
"""Range of log w."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of phi(w) A log theta, w the ratio of the row and phi held constant; and the sum of phi."""
    log_w = (
        ((logprobs - behaviour).clamp(-20, 20) * mask)
        .sum(1, keepdim=True)
        .clamp(LOWEST, HIGHEST)
        .detach()
    )
    is_good = advantages >= 0
    k, fall = (
        is_good * good + ~is_good * bad for good, bad in zip(POSITIVE, NEGATIVE, strict=True)
    )
    phi = (k * log_w + fall * (1 - log_w.exp())).exp()
    return (-phi * advantages * logprobs * mask).sum(), {"phi": (phi * mask).sum()}
