"""`algorithm.loss_function`, a policy loss of the user's own: called, and checked at every call.

The function gets tensors (rows, tokens), 0 outside `mask`, and returns the sum of its loss over the
tokens in the mask, with sums to report. It is called on copies: the model learns only from its
gradient by logprobs and entropies, so a fault is found there, before a weight moves. The caller
divides by the global N.
"""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.process import no_teardown
from prefixrl.learner.training.ppo import PolicyTerms, Sums, masked

log = logging.getLogger(__name__)

KEY = "algorithm.loss_function"
FIRST, BY_NAME = user_function.CALLS[KEY]
SLOW_S = 2.0
LOST_S = 600.0
"""Time in one call until the log names the function, once; time from then until the process ends,
because the function never returns."""
_TOLD = set[str]()
STEP, TOLERANCE = 1e-6, 1e-5
"""Step of the finite differences, and largest distance of a gradient from them, as a share of the
largest gradient (at least 1)."""


@contextmanager
def time_watched(what: str, size: str) -> Iterator[None]:
    """Watch the time of one call of a user's function.

    The log names a slow function once; the process ends if the call never returns.

    Args:
        what: the key and the function, for messages.
        size: amount of work of this call, for messages.
    """
    has_ended = threading.Event()

    def watch() -> None:
        if what not in _TOLD:
            log.warning(
                "%s has taken %g s for %s so far, and every step calls it; does it loop over tokens or "
                "rows in Python?",
                what,
                SLOW_S,
                size,
            )
        _TOLD.add(what)
        if not has_ended.wait(LOST_S):
            with no_teardown():  # nothing else ends a thread that is inside a function
                raise ConfigError(
                    f"{what} has not returned {LOST_S:g} s later; does a loop of it never end?"
                )

    timer = threading.Timer(SLOW_S, watch)
    timer.start()
    try:
        yield
    finally:
        has_ended.set()
        timer.cancel()


class UserLoss:
    """A function of the user's as `PolicySettings.loss_function`."""

    def __init__(self, function_ref: str) -> None:
        self._ref = function_ref
        self._function = user_function.load(function_ref)
        self._by_name = [name for name in BY_NAME if user_function.takes(self._function, name)]
        self.metrics: tuple[str, ...] | None = None
        """Names of its sums, those of the first call: all calls, on all ranks, must give the same."""

    def __call__(self, terms: PolicyTerms) -> tuple[Tensor, Sums]:
        """Return the sum of the loss, with a gradient to logprobs and entropy, and its other sums by name.

        Raises:
            ConfigError: it failed, or did not return a finite loss with a finite gradient, and finite logprobs went in.
        """
        mask = terms.mask
        # A filler has no token to call the function with, but its sums have the same names.
        if self.metrics is not None and not mask.any():
            nothing = torch.zeros((), dtype=torch.float64, device=mask.device)
            return nothing, dict.fromkeys([f"loss/{name}" for name in self.metrics], nothing)
        inside = masked(
            mask, terms.logprobs, terms.entropy, terms.proximal, terms.behaviour, terms.advantages
        )
        live = dict(zip(("logprobs", "entropy"), inside[:2], strict=True))
        copies = {name: each.detach().requires_grad_() for name, each in live.items()}
        reference = None if terms.reference is None else masked(mask, terms.reference)[0]
        arguments = dict(zip(("proximal", "behaviour", "advantages"), inside[2:], strict=True))
        columns = copies | arguments | {"mask": mask, "reference": reference, "ages": terms.ages}
        loss, sums = self.value(columns)
        gradients = self._gradients(loss, copies, mask)
        # The value is the loss itself; its gradient is the one that was checked on the copies.
        total = loss.detach()
        for name, gradient in gradients.items():
            pushed = gradient * live[name]
            total = total + (pushed - pushed.detach()).sum()
        return total, {
            f"loss/{name}": mask.new_tensor(each, dtype=torch.float64)
            for name, each in sums.items()
        }

    def value(self, columns: Mapping[str, Tensor | None]) -> tuple[Tensor, dict[str, float]]:
        """Call the function; return its loss and its sums by name, in order; raises ConfigError."""
        try:
            size = "a micro-batch of {} rows x {} tokens".format(*columns["mask"].shape)  # type: ignore[union-attr]
            with torch.enable_grad(), time_watched(f"{KEY} = {self._ref!r}", size):
                returned = self._function(
                    *(columns[name] for name in FIRST), **{n: columns[n] for n in self._by_name}
                )
        except BaseException as error:  # whatever it raises is its own: signals raise nothing here
            raise self._fault(
                f"failed: {user_function.explain(error, user_function.file_of(self._ref))}"
            ) from error
        match returned:
            case (Tensor() as loss, dict() as sums) if all(isinstance(name, str) for name in sums):
                pass
            case _:
                raise self._fault(
                    f"returned {_kind_of(returned)}; expected (loss, metrics): a tensor, and sums by name"
                )
        if loss.shape != ():
            raise self._fault(
                f"returned a loss of shape {tuple(loss.shape)}; expected the sum over tokens, one number"
            )
        self.metrics = self.metrics or tuple(sorted(sums))
        if tuple(sorted(sums)) != self.metrics:
            raise self._fault(
                f"returned metrics {', '.join(sorted(sums))}; at first they were {self.metrics}"
            )
        return loss, {name: user_function.number(sums[name]) for name in self.metrics}

    def _gradients(
        self, loss: Tensor, copies: Mapping[str, Tensor], mask: Tensor
    ) -> dict[str, Tensor]:
        """Return the gradients by name where the loss has any; raises ConfigError."""
        of_copies: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            of_copies = torch.autograd.grad(loss, list(copies.values()), allow_unused=True)
        gradients = {
            name: each for name, each in zip(copies, of_copies, strict=False) if each is not None
        }
        if not gradients:
            raise self._fault(
                "returned a loss without a gradient; is logprobs detached, or under no_grad, in it?"
            )
        for name, gradient in gradients.items():
            bad = ~torch.isfinite(gradient)
            # Only for finite inputs is it the function's fault; others are a fault of the weights.
            if torch.isfinite(copies[name]).all() and (bad.any() or not torch.isfinite(loss)):
                at = bad.nonzero()[:1].tolist()
                where = f", and a gradient that is not finite at row, token {at[0]}" if at else ""
                raise self._fault(
                    f"returned a loss of {loss.item():g}{where}; look for a division, log or root of 0"
                )
            # Outside of the mask is padding: what it pushes would depend on how rows are batched.
            if (gradient[~mask] != 0).any():
                raise self._fault(
                    f"pushes {name} outside of the mask; leave out what the mask does before the sum"
                )
        return gradients

    def _fault(self, said: str) -> ConfigError:
        return ConfigError(f"{KEY} = {self._ref!r} {said}")

    def try_on_rows(self) -> None:
        """Call it on made-up rows, whole and in two micro-batches; raises ConfigError where it is no sum over rows."""
        terms = random_terms(torch.float32)
        whole, _ = self(terms)
        parts = sum(
            self(PolicyTerms(**{name: each[rows, :tokens] for name, each in vars(terms).items()}))[
                0
            ]
            for rows, tokens in ((slice(0, 2), 6), (slice(2, 4), 2))
        )
        if not torch.isclose(whole, torch.as_tensor(parts), rtol=1e-3, atol=1e-4):
            raise self._fault(
                f"returned a loss of {whole.item():g} for 4 rows, and {float(parts):g} for the same in two "
                f"micro-batches; expected a sum that neither padding nor other rows change: prefixrl divides it by N"
            )

    def report(self) -> str:
        """Return what trying it found; raises ConfigError where its gradient is not that of its loss."""
        gap = self.gradient_gap()
        comparison = f"the gradient is {gap:.1e} of its largest value away from finite differences in float64"
        if gap > TOLERANCE:
            raise self._fault(
                f"is wrong: {comparison}; does a backward of its own differ, or does it leave float64?"
            )
        metrics = ", ".join(f"loss/{name}" for name in self.metrics or ()) or "none"
        return f"{self._ref}: a sum over rows, in one micro-batch or two; {comparison}\nmetrics: {metrics}"

    def gradient_gap(self) -> float:
        """Return how far the gradient is from finite differences in float64, as a share of the largest (at least 1).

        What the function detaches, or computes under no_grad, counts as constant.
        """
        terms, constants = random_terms(torch.float64), _Constants()
        columns = {name: getattr(terms, name) for name in (*FIRST, *BY_NAME)}
        copies = {name: columns[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
        with constants:
            gradients = self._gradients(self.value(columns | copies)[0], copies, terms.mask)
        largest, gap = 1.0, 0.0
        for name, gradient in gradients.items():
            for place in terms.mask.nonzero().tolist():
                ends = []
                for step in (STEP, -STEP):
                    moved = columns[name].clone()
                    moved[tuple(place)] += step
                    with constants.again():
                        ends.append(self.value(columns | {name: moved})[0].item())
                slope = gradient[tuple(place)].item()
                largest = max(largest, abs(slope))
                gap = max(gap, abs((ends[0] - ends[1]) / (2 * STEP) - slope))
        return gap / largest


class _Constants(TorchFunctionMode):
    """Keeps what is detached in a first call, and gives it again in the calls after it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []
        self._place: int | None = None

    def again(self) -> "_Constants":
        """Return itself, at the beginning of another call."""
        self._place = 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, or give again, the result of one operation."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and func not in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            return result
        if self._place is None:
            self._kept.append(result)
            return result
        self._place += 1
        return self._kept[self._place - 1]


@lru_cache(maxsize=1)
def load(function_ref: str) -> UserLoss:
    """Return the function of a resolved reference, tried once per process; raises ConfigError."""
    loss = UserLoss(function_ref)
    loss.try_on_rows()
    return loss


def random_terms(dtype: torch.dtype) -> PolicyTerms:
    """Return 4 rows of up to 6 tokens, one of them without any, as a run might have them."""
    random, shape = torch.Generator().manual_seed(7), (4, 6)
    mask = torch.arange(6) < torch.tensor([[6], [3], [2], [0]])
    names = ("logprobs", "entropy", "proximal", "behaviour", "reference", "advantages")
    drawn = {
        name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for name in names
    }
    for name in ("logprobs", "proximal", "behaviour", "reference"):
        drawn[name] = 0.3 * drawn[name] - 2.0
    columns: dict[str, Any] = dict(zip(names, masked(mask, *drawn.values()), strict=True))
    return PolicyTerms(**columns, mask=mask, ages=torch.ones(shape, dtype=torch.int64))


def _kind_of(value: object) -> str:
    return (
        f"({', '.join(map(_kind_of, value))})" if isinstance(value, tuple) else type(value).__name__
    )


if __name__ == "__main__":
    with exit_codes():
        sys.stdout.write(f"{load(user_function.resolve(KEY, sys.argv[1], Path.cwd())).report()}\n")
