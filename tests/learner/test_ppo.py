"""The losses against slow twins that loop over tokens, and what must not change them."""

import math
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefixrl.learner.ppo import (
    PolicySettings,
    PolicyTerms,
    ValueTerms,
    kl_estimate,
    policy_loss,
    token_logprobs,
    value_loss,
)

Correction = Literal["decoupled", "behaviour", "none"]
Estimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence"]

seeds = st.integers(0, 2**31 - 1)
settings_drawn = st.builds(
    PolicySettings,
    correction=st.sampled_from(get_args(Correction)),
    clip=st.floats(0.05, 0.5),
    importance_cap=st.floats(0.5, 4.0),
    aggregation=st.sampled_from(get_args(Aggregation)),
    entropy=st.sampled_from([0.0, 0.01, -0.01]),
    kl_in_loss=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(("k2", "k3")),
)


def terms_of(seed: int) -> tuple[list[int], PolicyTerms]:
    """Ragged random terms, with junk under the padding that would overflow any exp."""
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = random.integers(1, 7, random.integers(1, 6)).tolist()
    mask = torch.arange(max(sizes))[None, :] < torch.tensor(sizes)[:, None]

    def draw(mean: float, spread: float, junk: float) -> Tensor:
        values = torch.from_numpy(random.normal(mean, spread, mask.shape))
        return values.masked_fill(~mask, junk)

    return sizes, PolicyTerms(
        logprobs=draw(-2.0, 0.4, -900.0).requires_grad_(True),
        entropy=draw(1.5, 0.3, 55.0).requires_grad_(True),
        proximal=draw(-2.0, 0.4, 900.0),
        behaviour=draw(-2.0, 0.4, 0.0),
        reference=draw(-2.0, 0.4, math.inf),
        advantages=draw(0.0, 1.0, 0.0),
        mask=mask,
    )


def slow_policy_loss(
    sizes: list[int], terms: PolicyTerms, settings: PolicySettings, normaliser: float
) -> float:
    theta, p, mu = terms.logprobs.tolist(), terms.proximal.tolist(), terms.behaviour.tolist()
    assert terms.reference is not None
    ref, a, h = terms.reference.tolist(), terms.advantages.tolist(), terms.entropy.tolist()
    total = 0.0
    for i, size in enumerate(sizes):
        row = 0.0
        for t in range(size):
            old = mu[i][t] if settings.correction == "behaviour" else p[i][t]
            rho = math.exp(theta[i][t] - old)
            w = 1.0
            if settings.correction == "decoupled":
                w = min(math.exp(p[i][t]) / math.exp(mu[i][t]), settings.importance_cap)
            clipped = min(max(rho, 1 - settings.clip), 1 + settings.clip)
            row -= w * min(rho * a[i][t], clipped * a[i][t]) + settings.entropy * h[i][t]
            k = theta[i][t] - ref[i][t]
            k = k * k / 2 if settings.kl_estimator == "k2" else math.exp(-k) - 1 + k
            row += settings.kl_in_loss * k
        total += row / size if settings.aggregation == "sequence" else row
    return total / normaliser


@given(seeds, settings_drawn)
def test_the_policy_loss_is_the_formula_summed_token_by_token(
    seed: int, settings: PolicySettings
) -> None:
    sizes, terms = terms_of(seed)
    loss, sums = policy_loss(terms, settings, 13.0)
    assert math.isclose(loss.item(), slow_policy_loss(sizes, terms, settings, 13.0), abs_tol=1e-9)
    assert sums["tokens"].item() == sum(sizes)
    assert all(math.isfinite(value.item()) for value in sums.values())


@given(seeds, settings_drawn)
def test_the_loss_does_not_depend_on_order_padding_or_micro_batches(
    seed: int, settings: PolicySettings
) -> None:
    sizes, terms = terms_of(seed)
    whole, sums = policy_loss(terms, settings, 13.0)
    order = np.random.Generator(np.random.PCG64(seed + 1)).permutation(len(sizes)).tolist()
    cut = seed % (len(sizes) + 1)
    pieces = [rows for rows in (order[:cut], order[cut:]) if rows]
    parts = [policy_loss(narrowed(terms, rows, sizes), settings, 13.0) for rows in pieces]
    assert math.isclose(sum(loss.item() for loss, _ in parts), whole.item(), abs_tol=1e-5)
    for name, value in sums.items():
        assert math.isclose(
            sum(each[name].item() for _, each in parts), value.item(), rel_tol=1e-6, abs_tol=1e-6
        )


def narrowed(terms: PolicyTerms, rows: list[int], sizes: list[int]) -> PolicyTerms:
    """Some rows, padded two columns further than they need."""
    width = max(sizes[row] for row in rows)
    cut = {
        name: torch.nn.functional.pad(tensor[rows, :width], (0, 2), value=0)
        for name, tensor in vars(terms).items()
        if tensor is not None
    }
    return PolicyTerms(**cut)


@given(seeds, settings_drawn)
def test_no_gradient_leaks_out_of_the_padding_or_into_the_weights(
    seed: int, settings: PolicySettings
) -> None:
    _, terms = terms_of(seed)
    loss, _ = policy_loss(terms, settings, 13.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert terms.logprobs.grad is not None
    assert torch.isfinite(terms.logprobs.grad).all()
    assert not terms.logprobs.grad[~terms.mask].any()


def test_at_the_first_step_the_ratio_is_1_and_the_gradient_is_that_of_the_policy_gradient() -> None:
    _, terms = terms_of(3)
    settings = PolicySettings("none", 0.2, 2.0, "token", 0.0, 0.0, "k3")
    start = terms.proximal.clone().requires_grad_(True)
    loss, sums = policy_loss(replace(terms, logprobs=start), settings, 10.0)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(start.grad, torch.where(terms.mask, -terms.advantages / 10.0, 0.0))
    assert sums["ratio"].item() == sums["tokens"].item()
    assert sums["clipped"].item() == sums["approx_kl"].item() == 0.0


@pytest.mark.parametrize(("advantage", "gradient"), [(1.0, 0.0), (-1.0, 1.5)])
def test_a_ratio_past_the_clip_pulls_only_back(advantage: float, gradient: float) -> None:
    one = torch.zeros(1, 1)
    logprob = torch.full((1, 1), math.log(1.5), requires_grad=True)
    terms = PolicyTerms(logprob, one, one, one, None, torch.full((1, 1), advantage), one == 0)
    loss, sums = policy_loss(
        terms, PolicySettings("decoupled", 0.2, 2.0, "token", 0.0, 0.0, "k3"), 1.0
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradient)
    assert sums["clipped"].item() == (advantage > 0)


@given(seeds, st.sampled_from(get_args(Aggregation)), st.floats(0.05, 0.5))
def test_the_value_loss_is_the_formula_summed_token_by_token(
    seed: int, aggregation: Aggregation, clip: float
) -> None:
    sizes, terms = terms_of(seed)
    value_terms = ValueTerms(terms.logprobs, terms.proximal, terms.behaviour, terms.mask)
    loss, sums = value_loss(value_terms, clip, aggregation, 7.0)
    now, old, returns = (
        tensor.tolist() for tensor in (terms.logprobs, terms.proximal, terms.behaviour)
    )
    total, clipped = 0.0, 0
    for i, size in enumerate(sizes):
        row = 0.0
        for t in range(size):
            near = old[i][t] + min(max(now[i][t] - old[i][t], -clip), clip)
            row += 0.5 * max((now[i][t] - returns[i][t]) ** 2, (near - returns[i][t]) ** 2)
            clipped += (near - returns[i][t]) ** 2 > (now[i][t] - returns[i][t]) ** 2
        total += row / size if aggregation == "sequence" else row
    assert math.isclose(loss.item(), total / 7.0, abs_tol=1e-9)
    assert sums["value_clipped"].item() == clipped


@given(st.floats(-3.0, 0.0), st.floats(-3.0, 0.0))
def test_the_kl_estimators_are_schulmans(logprob: float, reference: float) -> None:
    pair = (
        torch.tensor(logprob, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
    )
    ratio = math.exp(reference) / math.exp(logprob)
    assert math.isclose(kl_estimate(*pair, "k1").item(), -math.log(ratio), abs_tol=1e-9)
    assert math.isclose(kl_estimate(*pair, "k2").item(), math.log(ratio) ** 2 / 2, abs_tol=1e-9)
    assert math.isclose(kl_estimate(*pair, "k3").item(), ratio - 1 - math.log(ratio), abs_tol=1e-9)


@given(seeds, st.sampled_from(["k1", "k3"]))
def test_k1_and_k3_average_to_the_kl_itself(seed: int, estimator: Estimator) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    p, q = (torch.log_softmax(torch.from_numpy(random.normal(size=5)), dim=0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum().item()
    assert math.isclose((p.exp() * kl_estimate(p, q, estimator)).sum().item(), exact, abs_tol=1e-9)


@given(seeds, st.floats(0.3, 2.0))
def test_logprobs_and_entropy_are_those_of_the_softmax_at_the_temperature(
    seed: int, temperature: float
) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    logits = torch.from_numpy(random.normal(0, 3, (2, 3, 7)))
    tokens = torch.from_numpy(random.integers(0, 7, (2, 3)))
    logprobs, entropy = token_logprobs(logits.bfloat16(), tokens, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    for i in range(2):
        for t in range(3):
            powers = [math.exp(value / temperature) for value in logits[i, t].bfloat16().tolist()]
            share = [power / sum(powers) for power in powers]
            assert math.isclose(logprobs[i, t].item(), math.log(share[tokens[i, t]]), abs_tol=1e-4)
            assert math.isclose(
                entropy[i, t].item(), -sum(x * math.log(x) for x in share), abs_tol=1e-4
            )
