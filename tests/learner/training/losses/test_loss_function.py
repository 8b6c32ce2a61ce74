"""Loss functions of the user's own: the shipped ones beside slow twins, what is refused of others, and by what name."""

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError
from prefixrl.learner.training import loss_function
from prefixrl.learner.training.ppo import PolicySettings, PolicyTerms, policy_loss
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.models.training import trained
from support.paths import ROOT

pytestmark = DEEPSPEED_WARNINGS

SHIPPED = ROOT / "deploy/examples/losses"


class Token(NamedTuple):
    """One token of a row."""

    theta: Tensor
    """Its logprob under the current policy, with a gradient."""
    p: float
    mu: float
    advantage: float
    age: int


Row = list[Token]
HEAD = "import time, torch\ndef loss(logprobs, proximal, behaviour, advantages, mask):\n    "


def settings_of(own: loss_function.UserLoss) -> PolicySettings:
    return PolicySettings("none", 0.2, 2.0, "token", 0.0, 0.0, "k3", loss_function=own)


def random_terms(seed: int) -> tuple[PolicyTerms, list[Row]]:
    """Rows of up to 7 tokens, far enough from mu for every clip, with junk under the padding; and their tokens."""
    random, sizes = torch.Generator().manual_seed(seed), torch.tensor([[7], [1], [4], [5]])
    mask = torch.arange(7) < sizes
    theta, p, mu, entropy, advantages = (
        torch.randn(5, 4, 7, generator=random, dtype=torch.float64)
    ).unbind()
    theta, p, mu = (-1.5 + 0.7 * each for each in (theta, p, mu))
    theta = theta.masked_fill(~mask, -900.0).requires_grad_()
    ages = torch.randint(0, 5, (4, 7), generator=random)
    terms = PolicyTerms(
        theta, entropy, p, mu.masked_fill(~mask, math.inf), None, advantages, mask, ages
    )
    fixed = [column.tolist() for column in (p, mu, advantages, ages)]
    rows = [
        [Token(theta[i, t], *(column[i][t] for column in fixed)) for t in range(size)]
        for i, (size,) in enumerate(sizes.tolist())
    ]
    return terms, rows


def summed(values: Iterable[Tensor]) -> Tensor:
    return sum(values, start=torch.zeros((), dtype=torch.float64))


def ratio_of(token: Token) -> float:
    return math.exp(token.theta.item() - token.mu)


def cispo(row: Row) -> Tensor:
    """Equation 4, with the weight's upper bound alone."""
    return summed(-min(ratio_of(token), 5.0) * token.advantage * token.theta for token in row)


def sapo(row: Row) -> Tensor:
    """Equation 6: 4/t sigmoid(t (r - 1)) A."""
    total = torch.zeros((), dtype=torch.float64)
    for token in row:
        t = 1.0 if token.advantage > 0 else 1.05
        gate = 1 + torch.exp(-t * (torch.exp(token.theta) / math.exp(token.mu) - 1))
        total = total - 4 / t / gate * token.advantage
    return total


def is_past_probability(token: Token) -> bool:
    moved = math.exp(token.theta.item()) - math.exp(token.mu)
    return moved > 0.2 if token.advantage > 0 else moved < -0.2


def squared_log_ratio(row: Row) -> Tensor:
    """`default_loss_fn` of prime-rl, token by token."""
    return summed(1e-3 * (token.theta - token.mu) ** 2 for token in row) + dppo(row)


def dppo(row: Row) -> Tensor:
    """theta/mu A where binary total variation is within its bound."""
    return summed(
        -token.advantage * torch.exp(token.theta - token.mu)
        for token in row
        if not is_past_probability(token)
    )


def vespo(row: Row) -> Tensor:
    """The gamma weight of the row's whole ratio, times A log theta."""
    w = math.prod(map(ratio_of, row))
    total = torch.zeros((), dtype=torch.float64)
    for token in row:
        k, fall = (2.0, 3.0) if token.advantage >= 0 else (3.0, 2.0)
        weight = math.exp(fall) * w**k * math.exp(-fall * w)
        total = total - weight * token.advantage * token.theta
    return total


def clipped(theta: Tensor, below: float, advantage: float) -> Tensor:
    """PPO's surrogate with a clip of 0.2."""
    ratio = torch.exp(theta - below)
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def opsm(row: Row) -> Tensor:
    """PPO's clip on theta/mu without rows of A < 0 whose mean log(mu/theta) is above 0.1."""
    drift = -math.log(math.prod(map(ratio_of, row)) ** (1 / len(row)))
    return summed(
        -clipped(token.theta, token.mu, token.advantage)
        for token in row
        if token.advantage >= 0 or drift <= 0.1
    )


def a3po(row: Row) -> Tensor:
    """The decoupled loss, p being mu times (theta/mu) to the power of a / (a + 1)."""
    total = torch.zeros((), dtype=torch.float64)
    for token in row:
        p = math.log(math.exp(token.mu) * ratio_of(token) ** (token.age / (token.age + 1)))
        weight = min(math.exp(p) / math.exp(token.mu), 2.0)
        total = total - weight * clipped(token.theta, p, token.advantage)
    return total


def topr(row: Row) -> Tensor:
    """A log theta, tapered by the row's ratio where A < 0."""
    taper = min(math.prod(map(ratio_of, row)), 1.0)
    return summed(
        -(taper if token.advantage < 0 else 1.0) * token.advantage * token.theta for token in row
    )


def bands(row: Row) -> Tensor:
    """The decoupled loss of tokens whose p/mu, and row whose geometric mean, is in [0.5, 2]."""
    weights = [math.exp(token.p) / math.exp(token.mu) for token in row]
    row_mean = math.prod(weights) ** (1 / len(row))
    return summed(
        -min(weight, 2.0) * clipped(token.theta, token.p, token.advantage)
        for token, weight in zip(row, weights, strict=True)
        if 0.5 <= row_mean <= 2.0 and 0.5 <= weight <= 2.0
    )


TWINS = [cispo, sapo, squared_log_ratio, vespo, dppo, opsm, a3po, topr, bands]


def test_every_shipped_loss_has_a_slow_twin() -> None:
    assert {path.stem for path in SHIPPED.glob("*.py")} == {twin.__name__ for twin in TWINS}


@given(seed=st.integers(0, 2**31 - 1), low=st.floats(0.01, 0.99), high=st.floats(1.01, 3.0))
def test_the_bands_keep_what_lies_in_both(seed: int, low: float, high: float) -> None:
    module = user_function._module(SHIPPED / "bands.py")
    terms, rows = random_terms(seed)
    token_band, row_band = (low, high), (low / 2 + 0.5, high / 2 + 0.5)
    for bands_on in ((None, None), (token_band, None), (None, row_band), (token_band, row_band)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "TOKEN_BAND", bands_on[0])
            patch.setattr(module, "ROW_BAND", bands_on[1])
            kept = module.kept_tokens(terms.proximal, terms.behaviour, terms.mask)
        for i, row in enumerate(rows):
            weights = [math.exp(token.p) / math.exp(token.mu) for token in row]
            mean = math.prod(weights) ** (1 / len(row))
            is_row_in = bands_on[1] is None or bands_on[1][0] <= mean <= bands_on[1][1]
            twin = [
                is_row_in and (bands_on[0] is None or bands_on[0][0] <= weight <= bands_on[0][1])
                for weight in weights
            ]
            assert kept[i].tolist() == twin + [False] * (kept.shape[1] - len(row))


def test_a_ratio_that_is_no_number_is_within_a_band() -> None:
    behaviour = torch.tensor([[0.0, -3.0, math.nan]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    kept = user_function._module(SHIPPED / "bands.py").kept_tokens
    assert kept(torch.zeros(1, 3), behaviour, mask).tolist() == [[True, False, True]]


def test_an_interpolated_proximal_is_mu_at_age_0_and_nears_theta_with_age() -> None:
    theta, mu = torch.full((1, 3), -1.0), torch.full((1, 3), -3.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = user_function.load(f"{SHIPPED}/a3po.py:loss")
    sums = loss(theta, mu, mu, torch.ones(1, 3), mask, torch.tensor([[0, 1, 9]]))[1]  # type: ignore[index]
    weights = [min(math.exp(p + 3.0), 2.0) for p in (-3.0, -2.0, -1.2)]
    assert sums["weight"].item() == pytest.approx(sum(weights))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("twin", TWINS)
def test_a_shipped_loss_is_that_of_its_paper(twin: Callable[[Row], Tensor], seed: int) -> None:
    terms, rows = random_terms(seed)
    own = loss_function.load(f"{SHIPPED}/{twin.__name__}.py:loss")
    loss, sums = policy_loss(terms, settings_of(own), 17.0)
    expected = sum(map(twin, rows)) / 17.0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    found, slow = (torch.autograd.grad(each, terms.logprobs)[0] for each in (loss, expected))
    torch.testing.assert_close(found, slow, rtol=1e-9, atol=1e-12)
    assert sums["tokens"].item() == 17 and sums["bounded"].item() == 0
    assert {f"loss/{name}" for name in own.metrics or ()} <= sums.keys()
    assert f"metrics: loss/{own.metrics[0]}" in own.report()  # type: ignore[index]


def written(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(HEAD + body + "\n")
    user_function._module.cache_clear()
    loss_function.load.cache_clear()
    return f"{folder}/mine.py:loss"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(
            "return (logprobs * float('nan')).sum(), {}",
            r"returned a loss of nan, and a gradient .* \[0, 0\]",
            id="nan",
        ),
        pytest.param(
            "return ((logprobs - logprobs.detach()).abs().sqrt() * mask).sum(), {}",
            "returned a loss of 0, and a gradient",
            id="a gradient that is not finite",
        ),
        pytest.param(
            "return logprobs * mask, {}",
            r"returned a loss of shape \(4, 6\); expected the sum over tokens, one number",
            id="a tensor",
        ),
        pytest.param(
            "return (logprobs.detach() * mask).sum(), {}",
            "returned a loss without a gradient; is logprobs detached",
            id="no gradient",
        ),
        pytest.param(
            "return 1 / 0",
            r"failed: ZeroDivisionError: division by zero \(mine.py, line 3\)",
            id="an exception",
        ),
        pytest.param("import sys; sys.exit()", "failed: SystemExit", id="an exit"),
        pytest.param(
            "return (logprobs * mask).sum()",
            r"returned Tensor; expected \(loss, metrics\)",
            id="no metrics",
        ),
        pytest.param(
            "return (logprobs * mask).sum(), [1]",
            r"returned \(Tensor, list\); expected",
            id="metrics in a list",
        ),
        pytest.param(
            "return (logprobs * advantages)[mask].mean(), {}",
            "returned a loss of .* in two micro-batches",
            id="a mean",
        ),
        pytest.param(
            "return logprobs.exp().sum(), {}",
            "pushes logprobs outside of the mask",
            id="outside of the mask",
        ),
        pytest.param(
            "return (logprobs * mask).sum() + mask.numel(), {}",
            "returned a loss of .* in two micro-batches",
            id="padding counted",
        ),
        pytest.param(
            "return (logprobs * mask).sum(), {str(mask.shape[0]): 1}",
            r"returned metrics 2; at first they were \('4',\)",
            id="metrics that change",
        ),
    ],
)
def test_a_broken_loss_is_named_before_the_first_step_as_the_users_fault(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"algorithm.loss_function = '{tmp_path}/mine.py:loss' {said}"
    ):
        loss_function.load(written(tmp_path, body))


def test_a_loss_that_fails_on_real_rows_alone_ends_their_first_step(
    tmp_path: Path, adapter: Path
) -> None:
    body = "x = (logprobs * mask).sum(); return x * (float('inf') if mask.sum() > 11 else 1), {}"
    config = run_config(
        adapter, algorithm={"name": "grpo", "loss_function": written(tmp_path, body)}
    )
    with pytest.raises(
        ConfigError, match=r"mine.py:loss' returned a loss of -?inf, and a gradient"
    ):
        trained(config, random_iteration(0))


def test_a_slow_loss_is_named_once_and_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loss_function, "SLOW_S", 0.05)
    with caplog.at_level(logging.WARNING):
        own = loss_function.load(
            written(tmp_path, "time.sleep(0.3); return (logprobs * mask).sum(), {}")
        )
    assert [each.getMessage().partition(" so far")[0] for each in caplog.records] == [
        f"algorithm.loss_function = '{tmp_path}/mine.py:loss' has taken 0.05 s for a micro-batch of 4 rows x 6 tokens"
    ]
    assert own.metrics == ()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["loss_function", "advantage_function"])
def test_a_function_that_never_returns_is_named_and_ends_the_process(
    key: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def turns(*_):\n    while True: pass\n")
    function = f"{tmp_path}/mine.py:turns"
    called = {
        "loss_function": f"own.load({function!r})",
        "advantage_function": "row_rewards(resolve(config, 8), [1.0], [0])",
    }
    program = (
        "from prefixrl.learner.training import loss_function as own\n"
        "from prefixrl.common.config.algorithm import AlgorithmConfig\n"
        "from prefixrl.learner.training.objectives import resolve, row_rewards\n"
        f"config = AlgorithmConfig(name='grpo', advantage_function={function!r})\n"
        f"own.SLOW_S = own.LOST_S = 0.2\n{called[key]}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 2
        and f"error: algorithm.{key} = '{function}' has not returned" in done.stderr
    )


def test_a_gradient_that_is_not_that_of_the_loss_is_found_in_float64_and_a_constant_weight_is_not(
    tmp_path: Path,
) -> None:
    weight = (
        "with torch.no_grad():\n        w = (logprobs - behaviour).exp()\n"
        "    return (w * logprobs * mask).sum(), {}"
    )
    assert loss_function.load(written(tmp_path, weight)).gradient_gap() < 1e-8
    hook = "y = logprobs * 1.0; y.requires_grad and y.register_hook(lambda g: 2 * g); return (y * mask).sum(), {}"
    command = [sys.executable, "-m", "prefixrl.deploy", "try-loss", written(tmp_path, hook)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "5.0e-01 of its largest value away from finite differences" in done.stderr
    )


def test_columns_are_given_by_name_and_entropy_is_pushed_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(logprobs, proximal, behaviour, advantages, mask, ages, *, entropy, reference=3):\n"
        "    assert reference is None and ages.dtype.is_floating_point is False\n"
        "    return -(entropy * mask).sum(), {'age': (ages * mask).sum()}\n"
    )
    terms = replace(random_terms(1)[0], ages=torch.full((4, 7), 2))
    entropy = terms.entropy.requires_grad_()
    loss, sums = policy_loss(terms, settings_of(loss_function.UserLoss(f"{path}:loss")), 2.0)
    (found,) = torch.autograd.grad(loss, entropy)
    assert torch.equal(found, -0.5 * terms.mask.double()) and sums["loss/age"].item() == 34.0
