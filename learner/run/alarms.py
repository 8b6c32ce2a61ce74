"""Alarms about a run that goes wrong while every process is well. Pure.

Each is given once when it begins, and again only after it had ended.
"""

import math
from collections import deque
from collections.abc import Mapping

LOW_ESS = 0.5
"""Below this, half of the old samples count for nothing."""
LOW_ENTROPY_SHARE = 0.1
"""Share of the first iterations' entropy. A policy that has learned the task is below it too, with a high reward."""
LOST_REWARD = 0.1
"""Below the best smoothed reward so far."""
STILL_BEGINS, STILL_ENDS, LEARNED = 0.05, 0.15, 0.9
"""Shares of the first iterations' entropy below which nothing new is tried, and above which something is again; a mean
reward at which that is no loss."""
NOISE = 0.02
"""Smoothed share of tokens that the engine's own difference keeps from being learned."""
ONE_TEXT = 0.8
"""Share of rows with one text from which the adapter has stopped to look at the question."""
ONE_TEXT_RISE = 0.2
"""By so much the share must have risen: an adapter may write one text mostly from the beginning."""
NO_REWARD_ITERATIONS = 3
"""Iterations in a row without any reward; a single one may be bad luck on a hard task."""
FLAT_FROM, FLAT_SPAN = 60, 20
"""Iterations before a reward may be called flat, and iterations at either end whose means are compared."""
FLAT_BEGINS, FLAT_ENDS = 2.0, 3.0
"""Rise in standard errors below which the reward is flat, and above which it is so no more."""
MIXED = 0.1
"""Share of the groups whose rewards must differ. From equal rewards nothing can be learned: that is another fault."""
Figures = Mapping[str, float]
"""Figures of an iteration by name."""
FIRST_ITERATIONS = 3
SMOOTHING = 0.2


class Alarms:
    """Looks at the figures of every iteration, in order."""

    def __init__(self) -> None:
        self._first_entropies: list[float] = []
        self._reward: float | None = None
        self._best_reward = 0.0
        self.ringing: dict[str, str] = {}
        """Alarms of the newest iteration by kind, in words."""
        self._least_share = 1.0
        self._noise = 0.0
        self._without_reward = 0
        self._looks = 0
        self._first_sum = 0.0
        self._squares = 0.0
        self._newest: deque[float] = deque(maxlen=FLAT_SPAN)

    def new_sentences(self, iteration: int, figures: Figures) -> list[str]:
        """Return the sentences of alarms that begin at this iteration."""
        sentences = {
            "ess": self._ess(figures),
            "entropy": self._entropy(figures),
            "exploration": self._exploration(figures),
            "noise": self._by_noise(figures),
            "one_text": self._one_text(figures),
            "no_reward": self._no_reward(figures),
            "plateau": self._plateau(figures),
        }
        begun = [
            f"iteration {iteration}: {text}"
            for name, text in sentences.items()
            if text and name not in self.ringing
        ]
        self.ringing = {name: text for name, text in sentences.items() if text}
        return begun

    def _ess(self, figures: Figures) -> str:
        """Return the sentence for old samples that count for little, else ""."""
        ess = figures.get("old_ess_fraction", 1.0)
        if ess >= LOW_ESS:
            return ""
        return (
            f"the policy has left its samples behind: the effective sample size of tokens of age 1 and more is "
            f"{ess:.2f} of their number; lower the learning rate, the optimiser steps per batch or "
            f"algorithm.max_staleness (docs/staleness.md)"
        )

    def _entropy(self, figures: Figures) -> str:
        """Return the sentence for an entropy that fell while the reward fell too, else an empty one."""
        entropy = figures.get("entropy")
        reward = figures.get("reward")
        if entropy is None or reward is None:
            return ""
        self._reward = (
            reward if self._reward is None else self._reward + SMOOTHING * (reward - self._reward)
        )
        self._best_reward = max(self._best_reward, self._reward)
        # The first iterations are the measure of what is low: no entropy is usual for all models.
        if len(self._first_entropies) < FIRST_ITERATIONS:
            self._first_entropies.append(entropy)
            return ""
        first = sum(self._first_entropies) / len(self._first_entropies)
        # A low entropy alone is no fault: a policy that is sure and right has one too.
        if entropy >= LOW_ENTROPY_SHARE * first or self._reward > self._best_reward - LOST_REWARD:
            return ""
        return (
            f"the policy has collapsed: entropy {entropy:.3g} nat per token ({first:.3g} in the first iterations), "
            f"reward {self._reward:.3f} (best {self._best_reward:.3f}); resume from an older checkpoint with a smaller "
            f"learning rate, a smaller algorithm.max_staleness or a larger algorithm.entropy"
        )

    def _exploration(self, figures: Figures) -> str:
        """Return the sentence for an entropy that is gone before the task is learned, else an empty one."""
        entropy = figures.get("entropy")
        reward = figures.get("reward", 1.0)
        first = sum(self._first_entropies) / max(1, len(self._first_entropies))
        most = STILL_ENDS if "exploration" in self.ringing else STILL_BEGINS
        if (
            entropy is None
            or entropy >= most * first
            or max(reward, self._reward or 0.0) >= LEARNED
        ):
            return ""
        return (
            f"the policy no longer explores at a reward of {reward:.3f}: entropy {entropy:.3g} nat per token "
            f"({first:.3g} in the first iterations). That is right where a question settles its text, as a calculation "
            f"does: see if `prefixrl samples` shows other texts for other questions. Else keep this checkpoint, since "
            f"what it never writes now it will not find, and resume from an older one with a larger algorithm.entropy "
            f"or a smaller learning rate"
        )

    def _by_noise(self, figures: Figures) -> str:
        """Return the sentence for tokens that `bound_ratio` holds though nothing was learned from them, else ""."""
        share = figures.get("bounded_by_noise_fraction")
        if share is None:
            return ""
        self._noise += SMOOTHING * (share - self._noise)
        if self._noise < NOISE:
            return ""
        gap = figures.get("engine_mismatch_gap", 0.0)
        return (
            f"algorithm.bound_ratio keeps {self._noise:.1%} of the tokens of age 0 from being learned, negative rows "
            f"first, and the cause is not drift: engine and learner differ by {gap:.2g} nat per token before any "
            f'step. Raise bound_ratio or set it "off", or give both the same dtype (docs/objectives.md)'
        )

    def _one_text(self, figures: Figures) -> str:
        """Return the sentence for one text in nearly all rows, if that is new, else ""."""
        share = figures.get("commonest_text_fraction")
        if share is None:
            return ""
        self._least_share = min(self._least_share, share)
        if share < ONE_TEXT or share - self._least_share < ONE_TEXT_RISE:
            return ""
        return (
            f"the adapter writes one and the same text in {share:.0%} of the rows, whatever the question (at the "
            f"least it was {self._least_share:.0%}); `prefixrl samples` shows it. Unless you look for that text, "
            f"resume from an older checkpoint with a smaller learning rate or a larger algorithm.entropy"
        )

    def _no_reward(self, figures: Figures) -> str:
        """Return the sentence for iterations in which every answer had reward 0, else ""."""
        self._without_reward = self._without_reward + 1 if figures.get("reward") == 0.0 else 0
        if self._without_reward < NO_REWARD_ITERATIONS:
            return ""
        return (
            f"every answer of the last {self._without_reward} iterations had reward 0, from which nothing can be "
            f"learned; `prefixrl samples` shows questions, texts and answers: check the reward function, the form "
            f"of the gold answers, and whether scorer.max_new_tokens cuts the answers (docs/your_own_task.md)"
        )

    def _plateau(self, figures: Figures) -> str:
        """Return the sentence for a reward that is within its noise of where it began, else ""."""
        reward = figures.get("reward")
        if reward is None:
            return ""
        # Differences of neighbours hold the noise alone, whatever the trend.
        self._squares += (reward - self._newest[-1]) ** 2 / 2 if self._newest else 0.0
        self._first_sum += reward if self._looks < FLAT_SPAN else 0.0
        self._looks += 1
        self._newest.append(reward)
        first = self._first_sum / FLAT_SPAN
        newest = sum(self._newest) / FLAT_SPAN
        error = math.sqrt(self._squares / self._looks * 2 / FLAT_SPAN)
        # It ends at another limit than it begins, or a reward near one limit would repeat it.
        most = FLAT_ENDS if "plateau" in self.ringing else FLAT_BEGINS
        is_mixed = figures.get("uniform_groups_fraction", 0.0) <= 1.0 - MIXED
        if (
            self._looks < FLAT_FROM
            or newest >= LEARNED
            or newest - first > most * error
            or not is_mixed
        ):
            return ""
        return (
            f"{self._looks} iterations have taught nothing that shows: reward {newest:.3f} in the newest {FLAT_SPAN}, "
            f"{first:.3f} in the first, and chance alone moves it by {error:.3f}; try four times learner.actor_lr and "
            f"critic_lr, then larger first weights of a tiny adapter (`prefixrl docs your_own_task`, section 9)"
        )
