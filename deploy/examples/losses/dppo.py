"""DPPO (Qi et al. 2026, arXiv 2602.04879): a bound on probabilities in place of the clip of ratios.

For long answers, in which unlikely tokens have large ratios although their probability hardly
moved: `algorithm.loss_function = ".../dppo.py:loss"`. Not measured here.
"""

from torch import Tensor

BOUND = 0.2
"""A token whose probability moved further than this from mu's, as it is pushed, has no loss."""


def loss(
    logprobs: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum of A theta/mu of the tokens within the bound, and the number of the others."""
    moved = logprobs.exp() - behaviour.exp()
    is_past = ((advantages > 0) & (moved > BOUND)) | ((advantages < 0) & (moved < -BOUND))
    ratio = (logprobs - behaviour).clamp(-20, 20).exp()
    surrogate = ratio * advantages * ~is_past
    return -(surrogate * mask).sum(), {"past_bound": (is_past & mask).sum()}
