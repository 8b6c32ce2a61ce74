"""The draw of a token: inverting the cumulative distribution, truncation, greedy choice."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.engines.embedded.drawing import draw, truncated
from prefixrl.common.wire.messages.groups import Sampling
from support.models.tiny_model import VOCABULARY


def inverse_cumulative(logits: list[float], temperature: float, uniform: float) -> int:
    """The first token whose cumulative probability is above the draw, token by token."""
    weights = [np.exp((value - max(logits)) / temperature) for value in logits]
    total, reached = sum(weights), 0.0
    for token, weight in enumerate(weights):
        reached += weight / total
        if reached > uniform:
            return token
    return len(logits) - 1


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.floats(0.25, 3.0),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_draw_inverts_the_cumulative_distribution(
    logits: list[float], temperature: float, uniform: float
) -> None:
    tokens, logprobs = draw(torch.tensor([logits]), temperature, np.array([uniform]))
    slow = {
        inverse_cumulative(logits, temperature, min(max(uniform + nudge, 0.0), 1.0))
        for nudge in (-1e-6, 0.0, 1e-6)
    }
    assert int(tokens[0]) in slow
    table = torch.log_softmax(torch.tensor(logits, dtype=torch.float64) / temperature, dim=0)
    assert float(logprobs[0]) == pytest.approx(table[int(tokens[0])].item(), abs=1e-4)
    assert float(logprobs[0]) <= 0.0


def test_many_draws_follow_the_distribution() -> None:
    logits, temperature, draws = [1.0, -2.0, 0.3, 2.0, -0.5], 0.8, 20_000
    uniforms = np.random.Generator(np.random.PCG64(8)).random(draws)
    tokens, _ = draw(torch.tensor([logits]).expand(draws, -1), temperature, uniforms)
    expected = draws * torch.softmax(torch.tensor(logits) / temperature, dim=0).numpy()
    counts = np.bincount(tokens, minlength=len(logits))
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: 1 in 1000


def test_rows_are_drawn_with_their_own_uniforms() -> None:
    tokens, _ = draw(torch.zeros(4, 4), 1.0, np.array([0.9, 0.6, 0.3, 0.1]))
    assert tokens.tolist() == [3, 2, 1, 0]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    almost_one = np.nextafter(1.0, 0.0)
    tokens, logprobs = draw(logits, 1.0, np.array([0.0, 0.499, 0.5, almost_one]))
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs == pytest.approx(np.log(0.5))


def test_greedy_takes_the_most_likely_token_whatever_the_draw() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32).flip(0).expand(3, -1)
    tokens, logprobs = draw(logits, 0.0, np.array([0.0, 0.5, 0.999]))
    assert tokens.tolist() == [0, 0, 0]
    assert (logprobs < 0).all()


@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=10, unique=True),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.05, 0.4]),
)
def test_truncation_leaves_out_what_its_definitions_say(
    quarters: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [each / 4 for each in quarters]
    sampling = Sampling(
        temperature=temperature, max_new_tokens=8, top_k=top_k, top_p=top_p, min_p=min_p
    )
    kept = truncated(torch.tensor([logits]), sampling)[0]
    weights = [math.exp(each / temperature) for each in logits]
    left = [place for place in range(len(logits)) if weights[place] >= min_p * max(weights)]
    left.sort(key=lambda place: -weights[place])
    left = left[: top_k or None]
    nucleus, mass, whole = [], 0.0, sum(weights[place] for place in left)
    for place in left:
        if mass < top_p * whole:
            nucleus.append(place)
        mass += weights[place]
    assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == set(nucleus)
    assert kept[nucleus].tolist() == pytest.approx([logits[place] for place in nucleus], abs=1e-5)


def test_without_truncation_and_when_greedy_logits_stay_as_they_are() -> None:
    logits = torch.randn(2, 5)
    assert truncated(logits, Sampling(temperature=0.7, max_new_tokens=8)) is logits
    assert truncated(logits, Sampling(temperature=0.0, max_new_tokens=8, top_k=1)) is logits
