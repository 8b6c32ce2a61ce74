"""The learning rate as a function of the optimiser step: pure."""

import math


def lr_at(step: int, total: int, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Linear warm-up, then half a cosine from `peak` down to `min_ratio * peak`, which holds past the end.

    Args:
        step: optimiser steps taken before this one, from 0.
        total: optimiser steps of the whole run.
        warmup_ratio: share of `total` spent warming up; the first step already learns.
    """
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
