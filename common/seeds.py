"""Where randomness comes from: every seed is a hash of the run's seed and of what the seed is for.

A redelivered task keeps its groups' sequence numbers and so its text; nothing depends on which worker draws.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def derive(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed for a purpose, e.g. `derive(run_seed, "group", seq)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def row_uniforms(group_seed: int, purpose: str, rows: int, tokens: int) -> NDArray[np.float64]:
    """Uniform draws in [0, 1), shape (rows, tokens): row i's draws depend on nothing but seed, purpose and i."""
    return np.stack(
        [
            np.random.Generator(np.random.PCG64(derive(group_seed, purpose, row))).random(tokens)
            for row in range(rows)
        ]
    )


def row_seed(uniforms: NDArray[np.float64]) -> int:
    """A row's seed: the 53 random bits of its first draw, so it depends on what the row's draws depend on."""
    return int(uniforms[0] * 2.0**53)
