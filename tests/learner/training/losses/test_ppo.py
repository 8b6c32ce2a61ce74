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

from prefixrl.learner.training import ppo

Aggregation = Literal["token", "sequence"]
INF = math.inf

seeds = st.integers(0, 2**31 - 1)
settings_drawn = st.builds(
    ppo.PolicySettings,
    correction=st.sampled_from(get_args(ppo.Correction)),
    clip=st.floats(0.05, 0.5),
    importance_cap=st.floats(0.5, 4.0),
    aggregation=st.sampled_from(get_args(Aggregation)),
    entropy=st.sampled_from([0.0, 0.01, -0.01]),
    kl_in_loss=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(("k2", "k3")),
    clip_high=st.none() | st.floats(0.05, 0.9),
    dual_clip=st.just(INF) | st.floats(1.1, 3.0),
    ratio=st.sampled_from(get_args(ppo.Ratio)),
    importance_ratio=st.none() | st.sampled_from(get_args(ppo.Ratio)),
    is_one_action=st.booleans(),
    above_cap=st.sampled_from(("truncate", "mask")),
    bound_ratio=st.just(INF) | st.floats(1.05, 2.0),
)


def terms_of(seed: int, outlier: float = 0.0) -> tuple[list[int], ppo.PolicyTerms]:
    """Ragged random terms, with junk under the padding that would overflow any exp.

    In the first token p and mu are `outlier` nats farther apart.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    sizes = random.integers(1, 7, random.integers(1, 6)).tolist()
    mask = torch.arange(max(sizes))[None, :] < torch.tensor(sizes)[:, None]

    def draw(mean: float, spread: float, junk: float) -> Tensor:
        values = torch.from_numpy(random.normal(mean, spread, mask.shape))
        return values.masked_fill(~mask, junk)

    proximal = draw(-2.0, 0.4, 900.0)
    proximal[0, 0] += outlier
    return sizes, ppo.PolicyTerms(
        logprobs=draw(-2.0, 0.4, -900.0).requires_grad_(True),
        entropy=draw(1.5, 0.3, 55.0).requires_grad_(True),
        proximal=proximal,
        behaviour=draw(-2.0, 0.4, 0.0),
        reference=draw(-2.0, 0.4, math.inf),
        advantages=draw(0.0, 1.0, math.nan),
        mask=mask,
        ages=torch.from_numpy(random.integers(0, 5, mask.shape)),
    )


def slow_policy_loss(
    sizes: list[int], terms: ppo.PolicyTerms, settings: ppo.PolicySettings, normaliser: float
) -> float:
    total = 0.0
    for i, size in enumerate(sizes):
        row = [slow_token(terms, settings, i, t, size) for t in range(size)]
        total += sum(row) / size if settings.aggregation == "sequence" else sum(row)
    return total / normaliser


def slow_token(
    terms: ppo.PolicyTerms, settings: ppo.PolicySettings, i: int, t: int, size: int
) -> float:
    """v KL - w (entropy term and surrogate) of one token, by multiplying probabilities; 0 in a row with an outlier."""
    theta, mu = (probabilities(tensor, i, size) for tensor in (terms.logprobs, terms.behaviour))
    p = probabilities(terms.proximal, i, size)
    if any(not 1e-4 <= quotient(p, mu, at, "token") <= 1e4 for at in range(size)):
        return 0.0
    value = slow_surrogate(terms, settings, i, t, (theta, p, mu))
    value += settings.entropy * terms.entropy[i, t].item()
    w = quotient(p, mu, t, settings.importance_ratio or settings.ratio)
    if w > settings.importance_cap:
        w = settings.importance_cap if settings.above_cap == "truncate" else 0.0
    v = min(quotient(theta, mu, t, "token"), settings.importance_cap)
    if settings.correction != "decoupled":
        w = 1.0
    if settings.correction == "none":
        v = 1.0
    return v * slow_kl(terms, settings, i, t) - w * value


def probabilities(logprobs: Tensor, i: int, size: int) -> list[float]:
    return [math.exp(each) for each in logprobs[i, :size].tolist()]


def quotient(above: list[float], below: list[float], t: int, ratio: ppo.Ratio) -> float:
    """A token's own ratio, the ratio of the whole row, or its geometric mean."""
    if ratio == "token":
        return above[t] / below[t]
    whole = math.prod(above) / math.prod(below)
    return whole if ratio == "prefix" else whole ** (1 / len(above))


def slow_surrogate(
    terms: ppo.PolicyTerms,
    settings: ppo.PolicySettings,
    i: int,
    t: int,
    policies: tuple[list[float], ...],
) -> float:
    a, (theta, p, mu) = terms.advantages[i, t].item(), policies
    rho = quotient(theta, mu if settings.correction == "behaviour" else p, t, settings.ratio)
    high = settings.clip if settings.clip_high is None else settings.clip_high
    value = min(rho * a, min(max(rho, 1 - settings.clip), 1 + high) * a)
    value = max(value, settings.dual_clip * a) if a < 0 else value
    return (
        value / len(theta) if settings.ratio == "prefix" and not settings.is_one_action else value
    )


def slow_kl(terms: ppo.PolicyTerms, settings: ppo.PolicySettings, i: int, t: int) -> float:
    assert terms.reference is not None
    k = (terms.logprobs[i, t] - terms.reference[i, t]).item()
    k = k * k / 2 if settings.kl_estimator == "k2" else math.exp(-k) - 1 + k
    return settings.kl_in_loss * k


@given(seeds, settings_drawn, st.sampled_from([0.0, 0.0, 12.0, -12.0]))
def test_the_policy_loss_is_the_formula_summed_token_by_token(
    seed: int, settings: ppo.PolicySettings, outlier: float
) -> None:
    sizes, terms = terms_of(seed, outlier)
    loss, sums = ppo.policy_loss(terms, settings, 13.0)
    assert math.isclose(loss.item(), slow_policy_loss(sizes, terms, settings, 13.0), abs_tol=1e-9)
    assert sums["tokens"].item() == sum(sizes)
    ratios = sum(sizes) if settings.ratio == "token" else len(sizes)
    weights = sum(sizes) if (settings.importance_ratio or settings.ratio) == "token" else len(sizes)
    assert sums["weights"].item() == weights
    assert (sums["rows"].item(), sums["rows_left_out"].item()) == (len(sizes), bool(outlier))
    assert sums["units"].item() == sums["log_ratio_bins"].sum().item() == ratios
    assert all(torch.isfinite(value).all() for value in sums.values())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("correction", ["decoupled", "behaviour"])
def test_the_kl_of_old_samples_has_the_gradient_of_the_current_policys(
    estimator: ppo.KlEstimator, correction: ppo.Correction
) -> None:
    """The mean over all tokens, each as likely as mu has it: k2 is the reverse KL's, k3 the forward KL's."""
    draws = torch.Generator().manual_seed(1)
    logits, older, start = (torch.randn(5, generator=draws, dtype=torch.float64) for _ in range(3))
    theta = logits.clone().requires_grad_(True)
    logprobs, mu, reference = (torch.log_softmax(each, 0) for each in (theta, older, start))
    column = logprobs.detach()[:, None].requires_grad_(True)
    zeros = torch.zeros(5, 1, dtype=torch.float64)
    terms = ppo.PolicyTerms(
        *(column, zeros, mu[:, None] + 0.3, mu[:, None], reference[:, None]),
        *(zeros, torch.ones(5, 1, dtype=torch.bool), torch.zeros(5, 1, dtype=torch.int64)),
    )
    settings = ppo.PolicySettings(correction, 0.2, INF, "token", 0.0, 1.0, estimator)
    ppo.policy_loss(terms, settings, 1.0)[0].backward()  # type: ignore[no-untyped-call]
    assert column.grad is not None
    (logprobs * mu.exp() * column.grad[:, 0]).sum().backward(retain_graph=True)
    actual, theta.grad = theta.grad, None
    if estimator == "k2":
        ((logprobs - reference) * logprobs.exp()).sum().backward()
    else:
        ((reference - logprobs) * reference.exp()).sum().backward()
    assert actual is not None and theta.grad is not None
    assert torch.allclose(actual, theta.grad, atol=1e-12)


@given(seeds, settings_drawn)
def test_past_a_bound_a_token_has_no_gradient_and_before_it_the_same_as_without(
    seed: int, settings: ppo.PolicySettings
) -> None:
    sizes, terms = terms_of(seed)
    settings = replace(settings, entropy=0.0, kl_in_loss=0.0)
    bounded, _ = gradients(terms, settings)
    free, _ = gradients(terms, replace(settings, bound_ratio=INF))
    for i, size in enumerate(sizes):
        theta, mu = (probabilities(tensor, i, size) for tensor in (terms.logprobs, terms.behaviour))
        if settings.ratio != "token":
            continue  # a gradient of one token is then the sum of all surrogates of its row
        for t in range(size):
            way = math.copysign(1, terms.advantages[i, t].item())
            is_past = quotient(theta, mu, t, "prefix") ** way > settings.bound_ratio
            assert bounded[i, t].item() == pytest.approx(
                0.0 if is_past else free[i, t].item(), abs=1e-12
            )


def gradients(terms: ppo.PolicyTerms, settings: ppo.PolicySettings) -> tuple[Tensor, float]:
    """Gradient of every logprob, and the loss."""
    start = terms.logprobs.detach().clone().requires_grad_(True)
    loss, _ = ppo.policy_loss(replace(terms, logprobs=start), settings, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert start.grad is not None
    return start.grad, loss.item()


@given(
    settings_drawn,
    st.sampled_from((-95.0, -21.0, 21.0, 95.0)),
    st.sampled_from((-95.0, -21.0, 0.0, 21.0, 95.0)),
    st.sampled_from((-1.0, 1.0)),
)
def test_ratios_beyond_any_float_leave_loss_and_gradient_finite_and_bounded(
    settings: ppo.PolicySettings, moved: float, behind: float, advantage: float
) -> None:
    """theta moved from p by `moved` nat, and p from mu by `behind`; float32, as the learner has it."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    mu = torch.full((1, 3), -100.0)
    p = mu + torch.tensor([[0.0, behind, 0.0]])
    theta = p + torch.tensor([[0.0, moved, 0.0]])
    terms = ppo.PolicyTerms(
        theta, torch.ones(1, 3), p, mu, mu, torch.full((1, 3), advantage), mask, torch.ones(1, 3)
    )
    gradient, loss = gradients(terms, replace(settings, dual_clip=min(settings.dual_clip, 3.0)))
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max().item() < 150.0


@given(seeds, settings_drawn)
def test_the_loss_does_not_depend_on_order_padding_or_micro_batches(
    seed: int, settings: ppo.PolicySettings
) -> None:
    sizes, terms = terms_of(seed)
    whole, sums = ppo.policy_loss(terms, settings, 13.0)
    order = np.random.Generator(np.random.PCG64(seed + 1)).permutation(len(sizes)).tolist()
    cut = seed % (len(sizes) + 1)
    pieces = [rows for rows in (order[:cut], order[cut:]) if rows]
    parts = [ppo.policy_loss(narrowed(terms, rows, sizes), settings, 13.0) for rows in pieces]
    assert math.isclose(sum(loss.item() for loss, _ in parts), whole.item(), abs_tol=1e-5)
    for name, value in sums.items():
        together = torch.stack([each[name] for _, each in parts]).sum(dim=0)
        torch.testing.assert_close(together, value, rtol=1e-6, atol=1e-6)


def narrowed(terms: ppo.PolicyTerms, rows: list[int], sizes: list[int]) -> ppo.PolicyTerms:
    """Some rows, padded two columns further than they need."""
    width = max(sizes[row] for row in rows)
    cut = {
        name: torch.nn.functional.pad(tensor[rows, :width], (0, 2), value=0)
        for name, tensor in vars(terms).items()
        if isinstance(tensor, Tensor)
    }
    return ppo.PolicyTerms(**cut)


@given(seeds, settings_drawn)
def test_no_gradient_leaks_out_of_the_padding_or_into_the_weights(
    seed: int, settings: ppo.PolicySettings
) -> None:
    _, terms = terms_of(seed)
    loss, _ = ppo.policy_loss(terms, settings, 13.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert terms.logprobs.grad is not None
    assert torch.isfinite(terms.logprobs.grad).all()
    assert not terms.logprobs.grad[~terms.mask].any()


def test_at_the_first_step_the_ratio_is_1_and_the_gradient_is_that_of_the_policy_gradient() -> None:
    _, terms = terms_of(3)
    settings = ppo.PolicySettings("none", 0.2, 2.0, "token", 0.0, 0.0, "k3")
    start = terms.proximal.clone().requires_grad_(True)
    loss, sums = ppo.policy_loss(replace(terms, logprobs=start), settings, 10.0)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(start.grad, torch.where(terms.mask, -terms.advantages / 10.0, 0.0))
    assert sums["ratio"].item() == sums["tokens"].item()
    assert sums["clipped"].item() == sums["approx_kl"].item() == 0.0


@pytest.mark.parametrize("correction", get_args(ppo.Correction))
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_of_fresh_samples_every_granularity_and_correction_has_the_same_gradient(
    correction: ppo.Correction, aggregation: Aggregation
) -> None:
    _, terms = terms_of(5)
    fresh = replace(
        terms,
        logprobs=terms.proximal,
        behaviour=terms.proximal,
        advantages=terms.advantages[:, :1].expand_as(terms.mask),
    )
    usual = ppo.PolicySettings("none", 0.2, 2.0, aggregation, 0.0, 0.0, "k3")
    expected, _ = gradients(fresh, usual)
    for ratio in get_args(ppo.Ratio):
        actual, _ = gradients(fresh, replace(usual, correction=correction, ratio=ratio))
        torch.testing.assert_close(actual, expected)


def one_token(
    log_ratio: float, advantage: float, settings: ppo.PolicySettings
) -> tuple[float, float, bool]:
    """Loss of a single token, its gradient, and whether it counts as clipped."""
    one = torch.zeros(1, 1)
    logprob = torch.full((1, 1), log_ratio, requires_grad=True)
    terms = ppo.PolicyTerms(
        logprob, one, one, one, None, torch.full((1, 1), advantage), one == 0, one
    )
    loss, sums = ppo.policy_loss(terms, settings, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item(), bool(sums["clipped"].item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "is_clipped"),
    [
        pytest.param(1.25, 1.0, 1.25, False, id="good, inside"),
        pytest.param(1.5, 1.0, 1.3, True, id="good, clipped above"),
        pytest.param(0.7, -1.0, -0.8, True, id="bad, clipped below"),
        pytest.param(2.5, -1.0, -2.5, False, id="bad, above"),
        pytest.param(5.0, -1.0, -3.0, True, id="bad, dual clip"),
        pytest.param(5.0, 1.0, 1.3, True, id="good, far above"),
    ],
)
def test_the_clip_is_asymmetric_and_a_bad_token_costs_no_more_than_the_dual_clip(
    ratio: float, advantage: float, objective: float, is_clipped: bool
) -> None:
    settings = ppo.PolicySettings("none", 0.2, 2.0, "token", 0.0, 0.0, "k3", 0.3, 3.0)
    loss, gradient, clipped = one_token(math.log(ratio), advantage, settings)
    assert loss == pytest.approx(-objective)
    assert clipped == is_clipped
    assert gradient == pytest.approx(0.0 if is_clipped else -ratio * advantage)


def test_a_masked_token_changes_no_loss() -> None:
    behaviour = torch.tensor([[0.0, -3.0, 0.0]])
    zeros = torch.zeros(1, 3)
    kept = torch.tensor([[True, False, True]])
    settings = ppo.PolicySettings("decoupled", 0.2, 2.0, "token", 0.1, 0.0, "k3")
    terms = ppo.PolicyTerms(zeros, zeros, zeros, behaviour, None, zeros + 1.0, kept, zeros)
    one, _ = ppo.policy_loss(terms, settings, 2.0)
    two, sums = ppo.policy_loss(replace(terms, behaviour=zeros, entropy=9.0 * ~kept), settings, 2.0)
    assert one.item() == two.item() == -1.0
    assert sums["tokens"].item() == sums["units"].item() == 2


@given(seeds, st.sampled_from(get_args(Aggregation)), st.floats(0.05, 0.5))
def test_the_value_loss_is_the_formula_summed_token_by_token(
    seed: int, aggregation: Aggregation, clip: float
) -> None:
    sizes, terms = terms_of(seed)
    value_terms = ppo.ValueTerms(terms.logprobs, terms.proximal, terms.behaviour, terms.mask)
    loss, sums = ppo.value_loss(value_terms, clip, aggregation, 7.0)
    now, old, returns = (
        tensor.tolist() for tensor in (terms.logprobs, terms.proximal, terms.behaviour)
    )
    total, clipped = 0.0, 0
    for i, size in enumerate(sizes):
        row = 0.0
        for t in range(size):
            near = old[i][t] + min(max(now[i][t] - old[i][t], -clip), clip)
            row += 0.5 * max((now[i][t] - returns[i][t]) ** 2, (near - returns[i][t]) ** 2)
            is_outside = abs(now[i][t] - old[i][t]) > clip
            clipped += is_outside and (near - returns[i][t]) ** 2 > (now[i][t] - returns[i][t]) ** 2
        total += row / size if aggregation == "sequence" else row
    assert math.isclose(loss.item(), total / 7.0, abs_tol=1e-9)
    assert sums["value_clipped"].item() == clipped


def test_a_value_within_the_range_is_not_clipped_by_rounding() -> None:
    torch.manual_seed(0)
    old, now = torch.randn(50, 40) * 0.02, torch.randn(50, 40) * 0.001
    assert float((now - old).abs().max()) < 0.2
    mask = torch.ones_like(old, dtype=torch.bool)
    _, sums = ppo.value_loss(ppo.ValueTerms(now, old, torch.randn(50, 40), mask), 0.2, "token", 1.0)
    assert sums["value_clipped"].item() == 0


@given(st.floats(-3.0, 0.0), st.floats(-3.0, 0.0))
def test_the_kl_estimators_are_schulmans(logprob: float, reference: float) -> None:
    pair = (
        torch.tensor(logprob, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
    )
    ratio = math.exp(reference) / math.exp(logprob)
    if ratio - 1 - math.log(ratio) > 10.0:
        assert ppo.kl_estimate(*pair, "k3").item() == 10.0
        return
    assert math.isclose(ppo.kl_estimate(*pair, "k1").item(), -math.log(ratio), abs_tol=1e-9)
    assert math.isclose(ppo.kl_estimate(*pair, "k2").item(), math.log(ratio) ** 2 / 2, abs_tol=1e-9)
    assert math.isclose(
        ppo.kl_estimate(*pair, "k3").item(), ratio - 1 - math.log(ratio), abs_tol=1e-9
    )
