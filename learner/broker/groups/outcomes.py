"""Outcomes of problems: the chance that a problem has right and wrong rows, and whether it is asked. Pure.

Only a group with right *and* wrong rows has a gradient. A problem is right with an unknown probability p, of which the
outcomes so far leave a Beta distribution; m rows differ with the probability

    d = E[1 - p^m - (1 - p)^m] = 1 - prod_i (a + i) / (a + b + i) - prod_i (b + i) / (a + b + i),    i = 0 .. m - 1

m is the rows of `GROUPS` groups: a problem that is right in one row of twenty has a gradient in every third group only,
but that group is worth waiting for.

    order of prompts ── position ──▶ is_asked: a draw below max(FLOOR, d) ──▶ a group
                            ▲ else the next position                           │
                            └──── counts of its problem and its source ◀───────┘   when a batch is formed

What comes first for a problem is its source: a Beta distribution with the mean and the agreement of rows that the
source's groups had. The policy changes: a new group of a problem lowers what its earlier groups count, all counts fade,
and `FLOOR` of the positions of every problem are asked whatever its counts are, so that no problem is lost. Counts
change only when a batch is formed, by record alone: a run that is resumed draws as the run that was left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixrl.common.journal.records import GroupOutcome, OutcomeCounts, OutcomeState
from prefixrl.common.run.status import OutcomePools
from prefixrl.common.seeds import derive

GROUPS = 4
"""Groups of a problem among whose rows a difference is looked for."""
FLOOR = 0.1
"""Least share of the positions of a problem that are asked."""
FEWEST_ITERATIONS = 20
"""Least half-life of a source's counts, in iterations; it is a pass over the problems where that takes longer."""
LONGER = 5
"""Half-lives of a source in one of a problem, whose turns may be passed over for many passes."""
REPEATED = 0.75
"""Worth of the earlier groups of a problem beside a new one."""
PRIOR_GROUPS = 1.0
"""Groups of Jeffreys' distribution, Beta(1/2, 1/2), that every source begins with."""
WEIGHTS = (0.2, 50.0)
"""Least and most rows that a source's outcomes count for with a problem of it."""
NEARLY = 0.01
"""Share of right rows up to which a problem counts as never right, and of wrong ones as always right."""


def differing_share(right: float, wrong: float, rows: int) -> float:
    """Return the probability that `rows` rows differ, for p from Beta(right, wrong)."""
    all_right = all_wrong = 1.0
    for drawn in range(rows):
        all_right *= (right + drawn) / (right + wrong + drawn)
        all_wrong *= (wrong + drawn) / (right + wrong + drawn)
    return 1.0 - all_right - all_wrong


def fitted_prior(source: OutcomeCounts, rows: int) -> tuple[float, float]:
    """Return the Beta distribution of p over the problems of a source, by its first two moments."""
    weight, pairs = PRIOR_GROUPS * rows, PRIOR_GROUPS * rows * (rows - 1)
    first = (source.right + weight / 2) / (source.rows + weight)
    # E[p^2] is the share of pairs of rows of one group that are both right.
    second = (source.right_pairs + pairs * 3 / 8) / (source.pairs + pairs)
    spread = second - first**2
    low, high = WEIGHTS
    size = high if spread <= 0 else min(high, max(low, (first - second) / spread))
    return size * first, size * (1.0 - first)


def scaled(counts: OutcomeCounts, worth: float) -> OutcomeCounts:
    """Return counts of which each is worth a part of what it was."""
    return OutcomeCounts(
        counts.iteration,
        worth * counts.right,
        worth * counts.rows,
        worth * counts.right_pairs,
        worth * counts.pairs,
    )


def added(counts: OutcomeCounts, outcome: GroupOutcome, iteration: int) -> OutcomeCounts:
    """Return counts with those of one more group."""
    right, rows = outcome.right, outcome.rows
    return OutcomeCounts(
        iteration,
        counts.right + right,
        counts.rows + rows,
        counts.right_pairs + max(0.0, right * (right - 1.0)),
        counts.pairs + rows * (rows - 1.0),
    )


@dataclass
class Outcomes:
    """Counts of a run by problem and by source; see the module's text."""

    seed: int
    rows: int
    """Rows of a group."""
    problems: int
    """Number of training problems."""
    half_life: float
    """Iterations after which a count of a source is worth half."""
    iteration: int = 0
    """The iteration after the newest batch."""
    by_problem: dict[int, OutcomeCounts] = field(default_factory=dict)
    by_source: dict[str, OutcomeCounts] = field(default_factory=dict)
    ended: list[GroupOutcome] = field(default_factory=list)
    """Judged groups that ended untrained since the newest batch."""
    passed_over: int = 0
    """Positions of the order of prompts that were not asked."""

    @classmethod
    def of_run(cls, seed: int, rows: int, problems: int, batch_groups: int) -> "Outcomes":
        """Return empty counts, whose half-life is a pass over the problems."""
        half_life = max(float(FEWEST_ITERATIONS), problems / batch_groups)
        return cls(seed, rows, problems, half_life)

    def is_asked(self, position: int, problem: int, source: str) -> bool:
        """Return True if the problem at a position of the order of prompts is asked."""
        chance = max(FLOOR, self.differing_chance(problem, source))
        return derive(self.seed, "asked", position) < chance * 2.0**63

    def differing_chance(self, problem: int, source: str) -> float:
        """Return the probability that `GROUPS` groups of a problem have right and wrong rows among them."""
        right, wrong = fitted_prior(self._source_counts(source), self.rows)
        counts = self._problem_counts(problem)
        return differing_share(
            right + counts.right, wrong + (counts.rows - counts.right), GROUPS * self.rows
        )

    def _source_counts(self, source: str) -> OutcomeCounts:
        counts = self.by_source.get(source, OutcomeCounts(self.iteration))
        return scaled(counts, 0.5 ** ((self.iteration - counts.iteration) / self.half_life))

    def _problem_counts(self, problem: int) -> OutcomeCounts:
        counts = self.by_problem.get(problem, OutcomeCounts(self.iteration))
        return scaled(
            counts, 0.5 ** ((self.iteration - counts.iteration) / (LONGER * self.half_life))
        )

    def form_batch(self, iteration: int, trained: Sequence[GroupOutcome]) -> None:
        """Count the groups of a batch, and those that ended untrained before it."""
        self.iteration = iteration + 1
        # By sequence number: the order of arrival must not decide the last bits.
        for outcome in sorted((*trained, *self.ended)):
            problem, source = outcome.problem, outcome.source
            before = scaled(self._problem_counts(problem), REPEATED)
            self.by_problem[problem] = added(before, outcome, self.iteration)
            self.by_source[source] = added(self._source_counts(source), outcome, self.iteration)
        self.ended = []

    @property
    def pools(self) -> OutcomePools:
        """The problems by what their groups were so far."""
        shares = [counts.right / counts.rows for counts in self.by_problem.values()]
        never = sum(share <= NEARLY for share in shares)
        always = sum(share >= 1.0 - NEARLY for share in shares)
        return OutcomePools(
            not_asked=self.problems - len(shares),
            never_right=never,
            mixed=len(shares) - never - always,
            always_right=always,
            passed_over=self.passed_over,
        )

    def state(self) -> OutcomeState:
        """Return what a segment of the journal begins with."""
        return OutcomeState(
            iteration=self.iteration,
            by_problem=dict(self.by_problem),
            by_source=dict(self.by_source),
            ended=tuple(self.ended),
            passed_over=self.passed_over,
        )

    def restore(self, state: OutcomeState) -> None:
        """Take over the start of a segment."""
        self.iteration, self.passed_over = state.iteration, state.passed_over
        self.by_problem, self.by_source = dict(state.by_problem), dict(state.by_source)
        self.ended = list(state.ended)
