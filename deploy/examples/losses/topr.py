"""TOPR (Le Roux et al. 2025, arXiv 2503.14286): good rows count whole, bad ones fade with age.

For runs in which most samples are old: `algorithm.loss_function = ".../topr.py:loss"`. Its figures
are in docs/staleness.md; it has no brake, so look at the worst seeds there.
"""

import torch
from torch import Tensor


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of A log theta, where A < 0 times min(theta/mu, 1) of the row, held constant."""
    row_log_ratio = ((logprobs - behaviour).detach() * mask).sum(dim=1, keepdim=True)
    is_tapered = (advantages < 0) & (row_log_ratio < 0)
    taper = torch.where(is_tapered, row_log_ratio.clamp(min=-20).exp(), 1.0)
    return -(taper * advantages * logprobs * mask).sum(), {"tapered": (is_tapered & mask).sum()}
