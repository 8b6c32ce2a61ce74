"""All randomness: every seed is a hash of the run's seed and of the seed's purpose.

A task that is sent again has the same seeds, so every worker writes the same text for it.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed for a purpose, for example `derive(run_seed, "group", seq)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def row_uniforms(group_seed: int, purpose: str, rows: int, tokens: int) -> NDArray[np.float64]:
    """Draw from [0, 1), shape (rows, tokens); row i depends only on seed, purpose and i."""
    return np.stack(
        [
            np.random.Generator(np.random.PCG64(derive(group_seed, purpose, row))).random(tokens)
            for row in range(rows)
        ]
    )


def row_seed(uniforms: NDArray[np.float64]) -> int:
    """Return a row's seed, the 53 random bits of its first draw."""
    return int(uniforms[0] * 2.0**53)
