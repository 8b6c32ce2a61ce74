"""The end of a run by cost: no group is begun whose completions would exceed `scorer.openai.most_cost`. Pure.

    forecast = cost so far + usual cost of a completion x (completions under way + those of one more group)

Once the forecast is above the ceiling no new group is begun: the run ends as if its data were used up, so what is under
way is scored and trained. An evaluation that would lead above the ceiling is refused whole. Before the usual cost is
known, at most one batch is under way; evaluations may be, and what does not fit of them is given up later.
"""

import math

from prefixrl.common.run.status import UsageTotal

LEAST_REQUESTS = 16
"""Answered requests after which their cost is the usual one: the first are trials of a few tokens."""


class CostCeiling:
    """The ceiling of a run, and whether it is reached."""

    def __init__(self, most_cost: float, group_texts: int, batch_groups: int) -> None:
        """Take the ceiling, the completions of a training group, and the groups of a batch."""
        self.most_cost = most_cost
        self._group_texts, self._batch_groups = group_texts, batch_groups
        self._cost, self._text_cost = 0.0, 0.0
        self.reason = ""
        """The reason why no group is begun any more, "" before."""

    def note_usage(self, total: UsageTotal | None) -> None:
        """Take the cost so far."""
        if total is not None and total.cost is not None:
            self._cost = total.cost
            is_usual = total.requests >= LEAST_REQUESTS or total.cost >= self.most_cost
            self._text_cost = total.cost / max(1, total.requests) if is_usual else 0.0

    def new_groups(self, open_texts: int) -> int:
        """Return how many groups may be begun beside so many completions under way; none once it was none."""
        if self.reason:
            return 0
        if not self._text_cost:
            return max(0, self._batch_groups - open_texts // self._group_texts)
        unspent = self.most_cost - self._cost - self._text_cost * open_texts
        groups = max(0, math.floor(unspent / (self._text_cost * self._group_texts)))
        if groups == 0:
            self.reason = (
                f"scorer.openai.most_cost = {self.most_cost:g} is reached: {self._cost:.4g} is spent, "
                f"{self._text_cost * open_texts:.2g} is expected for what is under way, and a group would cost "
                f"{self._text_cost * self._group_texts:.2g}; no new group is begun"
            )
        return groups

    def excess(self, open_texts: int) -> str:
        """Return why what is under way is too much by more than a batch, "" if it is not."""
        spared = self._group_texts * self._batch_groups
        return self.objection(0, open_texts - spared) if open_texts > spared else ""

    def objection(self, texts: int, open_texts: int) -> str:
        """Return why so many more completions would be too many, "" if they are not."""
        forecast = self._cost + self._text_cost * (open_texts + texts)
        if forecast <= self.most_cost:
            return ""
        return (
            f"the run would cost {forecast:.4g} with it, more than scorer.openai.most_cost = {self.most_cost:g}; "
            f"{self._cost:.4g} is spent"
        )
