"""Answers to a policy that collapses, `algorithm.on_collapse`. Pure.

    figures of an iteration ──▶ alarms ──▶ `PATIENCE` in a row, task not learned ──▶ an answer, twice at most
                                                                                              │
                       raise_entropy: a larger bonus from here on                      ◀──────┤
                       go_back: the weights of a checkpoint before it, and half the rates  ◀──┘

All that it knows follows from the figures of all iterations so far, in order, and from changes that a person made. So a
resumed run decides as the run before it did.
"""

import math
from collections.abc import Mapping
from typing import Literal

from prefixrl.learner.run.alarms import LEARNED, SMOOTHING, Alarms

OnCollapse = Literal["warn", "raise_entropy", "go_back"]
KINDS = ("entropy", "one_text")
"""Alarms of a policy that writes nothing new."""
PATIENCE = 3
MOST_ANSWERS = 2
GOOD_LOSS = 0.02
"""Distance from the best smoothed reward at which an iteration is as good."""
RECOVERY = 20
"""Iterations after an answer in which no other one is given."""
ENTROPY_FACTOR, LEAST_ENTROPY = 4.0, 0.01
"""Growth of the bonus with an answer, and the least bonus after the first."""
RATE_FACTOR = 0.5


class Collapse:
    """The answers given so far, and what they changed."""

    def __init__(self, on_collapse: OnCollapse, entropy: float) -> None:
        """`entropy`: the coefficient of the bonus in the run file."""
        self._on_collapse = on_collapse
        self.entropy = entropy
        """Coefficient of the bonus that applies now."""
        self.rate_scale = 1.0
        """Factor on the learning rates."""
        self.good_iteration = 0
        """Iterations that were trained when the smoothed reward was last near its best, and no alarm rang."""
        self.answers = 0
        self._alarms = Alarms()
        self._reward: float | None = None
        self._best_reward = -math.inf
        self._in_a_row = 0
        self._answered_at = -RECOVERY

    def add_iteration(self, iteration: int, figures: Mapping[str, float]) -> str:
        """Take the figures of an iteration; return why it is answered now, "" where it is not.

        The caller carries a go_back out; `entropy` and `rate_scale` have changed already.
        """
        self._alarms.new_sentences(iteration, figures)
        ringing = [self._alarms.ringing[kind] for kind in KINDS if kind in self._alarms.ringing]
        reward = figures.get("reward", 0.0)
        is_learned = max(reward, self._smoothed_reward(iteration, reward, not ringing)) >= LEARNED
        self._in_a_row = self._in_a_row + 1 if ringing and not is_learned else 0
        is_early = iteration - self._answered_at < RECOVERY
        if self._in_a_row < PATIENCE or is_early or self.answers == MOST_ANSWERS:
            return ""
        if self._on_collapse == "warn":
            return ""
        self._in_a_row, self._answered_at = 0, iteration
        self.answers += 1
        if self._on_collapse == "raise_entropy":
            self.entropy = max(LEAST_ENTROPY, ENTROPY_FACTOR * self.entropy)
        else:
            self.rate_scale *= RATE_FACTOR
        return ringing[0]

    def take_change(self, entropy: float | None, has_new_rate: bool) -> None:
        """Take a person's change over: it holds as it was given, until the next answer."""
        if entropy is not None:
            self.entropy = entropy
        if has_new_rate:
            self.rate_scale = 1.0

    def _smoothed_reward(self, iteration: int, reward: float, is_good: bool) -> float:
        before = reward if self._reward is None else self._reward
        self._reward = before + SMOOTHING * (reward - before)
        if is_good and self._reward >= self._best_reward - GOOD_LOSS:
            # The reward is that of the weights before the iteration.
            self.good_iteration = iteration
            self._best_reward = max(self._best_reward, self._reward)
        return self._reward
