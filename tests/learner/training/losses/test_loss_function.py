"""Loss functions of the user's own: the shipped ones beside slow twins, what is refused of others, and by what name."""

import logging
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError
from prefixrl.learner.training import loss_function
from prefixrl.learner.training.ppo import PolicySettings, PolicyTerms, policy_loss
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.models.training import trained
from support.paths import ROOT
from support.tables import table

pytestmark = DEEPSPEED_WARNINGS

SHIPPED = ROOT / "deploy/examples/losses"
Row = list[tuple[Tensor, float, float]]
"""log theta, log mu and A of each token of a row."""
HEAD = "import time, torch\ndef loss(logprobs, proximal, behaviour, advantages, mask):\n    "


def settings_of(own: loss_function.OwnLoss) -> PolicySettings:
    return PolicySettings("none", 0.2, 2.0, "token", 0.0, 0.0, "k3", own=own)


def random_terms(seed: int) -> tuple[PolicyTerms, list[Row]]:
    """Rows of up to 7 tokens, far enough from mu for every clip, with junk under the padding; and their tokens."""
    random, sizes = torch.Generator().manual_seed(seed), torch.tensor([[7], [1], [4], [5]])
    mask = torch.arange(7) < sizes
    theta, p, mu, entropy, advantages = (
        torch.randn(5, 4, 7, generator=random, dtype=torch.float64)
    ).unbind()
    theta, p, mu = (-1.5 + 0.7 * each for each in (theta, p, mu))
    theta = theta.masked_fill(~mask, -900.0).requires_grad_()
    terms = PolicyTerms(
        theta,
        entropy,
        p,
        mu.masked_fill(~mask, math.inf),
        None,
        advantages,
        mask,
        torch.zeros(4, 7, dtype=torch.long),
    )
    rows = [
        [(theta[i, t], mu[i, t].item(), advantages[i, t].item()) for t in range(n)]
        for i, (n,) in enumerate(sizes)
    ]
    return terms, rows


def cispo(row: Row) -> Tensor:
    """Equation 4, with the weight's upper bound alone."""
    return sum(-min(math.exp(now.item() - mu), 5.0) * a * now for now, mu, a in row)  # type: ignore[return-value]


def sapo(row: Row) -> Tensor:
    """Equation 6: 4/t sigmoid(t (r - 1)) A."""
    total = torch.zeros((), dtype=torch.float64)
    for now, mu, a in row:
        t = 1.0 if a > 0 else 1.05
        total = total - 4 / t / (1 + torch.exp(-t * (torch.exp(now) / math.exp(mu) - 1))) * a
    return total


def squared_log_ratio(row: Row) -> Tensor:
    """`default_loss_fn` of prime-rl, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for now, mu, a in row:
        moved = math.exp(now.item()) - math.exp(mu)
        is_masked = moved > 0.2 if a > 0 else moved < -0.2
        total = total + 1e-3 * (now - mu) ** 2 - (0.0 if is_masked else a) * torch.exp(now - mu)
    return total


def vespo(row: Row) -> Tensor:
    """The gamma weight of the row's whole ratio, times A log theta."""
    w = math.prod(math.exp(now.item()) / math.exp(mu) for now, mu, _ in row)
    total = torch.zeros((), dtype=torch.float64)
    for now, _, a in row:
        k, fall = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        total = total - math.exp(fall) * w**k * math.exp(-fall * w) * a * now
    return total


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("twin", [cispo, sapo, squared_log_ratio, vespo])
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


@table(__file__)
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
    assert [each.getMessage().partition(" for 0.05 s")[0] for each in caplog.records] == [
        f"algorithm.loss_function = '{tmp_path}/mine.py:loss' has worked on a micro-batch of 4 rows x 6 tokens"
    ]
    assert own.metrics == ()


@pytest.mark.parametrize("key", ["loss_function", "advantage_function"])
def test_a_function_that_never_returns_is_named_and_ends_the_process(
    key: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def turns(*_):\n    while True: pass\n")
    function = f"{tmp_path}/mine.py:turns"
    called = {
        "loss_function": f"own.load({function!r})",
        "advantage_function": f"_call({function!r}, [1.0], [0])",
    }
    program = (
        "from prefixrl.learner.training import loss_function as own\n"
        "from prefixrl.learner.training.objectives import _call\n"
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
    loss, sums = policy_loss(terms, settings_of(loss_function.OwnLoss(f"{path}:loss")), 2.0)
    (found,) = torch.autograd.grad(loss, entropy)
    assert torch.equal(found, -0.5 * terms.mask.double()) and sums["loss/age"].item() == 34.0
