"""Seeds are a function of the run's seed and their purpose, and nothing else."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.seeds import derive, row_uniforms

SEEDS = st.integers(0, 2**63 - 1)
PURPOSE = st.lists(st.integers(0, 10**9) | st.text(st.characters(categories=["L"]), min_size=1))


@given(SEEDS, PURPOSE)
def test_a_seed_is_the_hash_of_run_seed_and_purpose(seed: int, purpose: list[int | str]) -> None:
    text = str(seed)
    for part in purpose:
        text += f"/{part}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert derive(seed, *purpose) == sum(byte << 8 * i for i, byte in enumerate(digest)) // 2
    assert 0 <= derive(seed, *purpose) < 2**63


def test_seeds_stay_what_they_are_across_releases() -> None:
    assert derive(42, "group", 7) == 850870163146186762
    assert row_uniforms(derive(42, "group", 7), "prefix", 1, 3)[0].tolist() == [
        0.5276153814250861,
        0.046003124733271616,
        0.083193461280191,
    ]


def test_purposes_do_not_collide() -> None:
    purposes = [(kind, i) for kind in ("group", "iteration", "epoch") for i in range(2000)]
    assert len({derive(1, *purpose) for purpose in purposes}) == len(purposes)


@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
def test_a_rows_draws_depend_on_neither_the_other_rows_nor_the_length(
    seed: int, rows: int, more_rows: int, tokens: int, more_tokens: int
) -> None:
    small = row_uniforms(seed, "prefix", rows, tokens)
    large = row_uniforms(seed, "prefix", rows + more_rows, tokens + more_tokens)
    assert small.shape == (rows, tokens)
    assert np.array_equal(small, large[:rows, :tokens])
    assert ((small >= 0.0) & (small < 1.0)).all()


@given(SEEDS)
def test_rows_and_purposes_draw_differently(seed: int) -> None:
    prefix, completion = (row_uniforms(seed, name, 4, 8) for name in ("prefix", "completion"))
    assert len({row.tobytes() for row in (*prefix, *completion)}) == 8
