"""Figures of judged answers: accuracies, majorities, pass@k, differences of arms, and their intervals. Pure.

Test-time search takes one of several answers by scores of their steps; the names are OpenR's:

    prm_last_max    the answer whose last step has the highest score
    prm_last_vote   the answer with the highest sum of such scores over all answers equal to it

`min` and `product` in place of `last` take the lowest score of the steps, and their product. Answers are equal if their
rows have the same vote.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.wire.verdicts import Aggregate, aggregated

Z_975 = 1.959964
RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100
AGGREGATES: tuple[Aggregate, ...] = ("last", "min", "product")
CHOICES = tuple(f"prm_{how}_{by}" for by in ("max", "vote") for how in AGGREGATES)

Figures = dict[str, float]
"""Numbers by name, or by arm."""
Ends = tuple[float, float]
"""The ends of an interval."""
Interval = Literal["wilson", "bootstrap"]
"""wilson: for a fraction of problems, each answered once, right or wrong. bootstrap: for a mean over problems."""


class EvaluatedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One judged answer of one arm, a line of `evaluations/<arm>.<decoding>.jsonl`."""

    prompt_id: str
    family: str
    version: int
    """Version of the adapter that wrote the prefix; -1 where none did."""
    prefix: str
    completion: str
    extracted: str
    reward: float
    status: str
    finish: str = ""
    """End of the judged text; `length` where it was cut."""
    sample: int = 0
    """Number of the answer to the problem, from 0."""
    weights_digest: str = ""
    """Digest of the adapter that wrote the prefix: the proof of its version."""
    vote: str = ""
    """The first answer to the problem that the verifier finds equal; "" where answers were not compared."""
    scores: tuple[float, ...] | None = None
    """Score of every step by the process reward model; None where it scored none."""

    @property
    def ballot(self) -> str:
        """The answer that this one votes for; "" without an answer."""
        return self.vote or self.extracted.strip()


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward over problems; answers whose verifier failed are counted apart."""

    accuracy: float
    """With one answer per problem pass@1, with several avg@n."""
    ci95: Ends
    interval: Interval
    """Kind of `ci95`."""
    problems: int
    by_family: Figures
    truncated_fraction: float
    """Fraction of the judged texts that a length limit cut."""
    samples: int = 1
    """The most judged answers of a problem."""
    majority: float | None = None
    """maj@n: mean reward of the answer that each problem got most often; None with one answer per problem."""
    pass_at: Figures = {}
    """Chance that one of k answers is right, for k = 1, 2, 4 .. n; empty where rewards are fractions."""
    chosen: Figures = {}
    """Mean reward of the answer that scores of steps choose, by the names in `CHOICES`; empty without scores."""


class Point(msgspec.Struct, frozen=True):
    """The adapter of one version, greedy, on the held-out problems."""

    version: int
    accuracy: float
    ci95: Ends


def wilson(right: float, count: int) -> Ends:
    """Return Wilson's 95% score interval for a proportion (Wilson 1927)."""
    from scipy.stats import binomtest

    # A sum of fractions may be no whole number: the interval then spans those of both neighbours.
    low, high = (
        binomtest(whole, count).proportion_ci(0.95, method="wilson")
        for whole in (math.floor(round(right, 9)), math.ceil(round(right, 9)))
    )
    return float(low.low), float(high.high)


def bootstrap(means: Sequence[float]) -> Ends:
    """Return the 95% bootstrap interval of the mean of rewards in [0, 1]."""
    # Without spread, Wilson's interval is wider than any that such rewards can need.
    if min(means) == max(means):
        return wilson(sum(means), len(means))
    return percentile_interval(means)


def percentile_interval(values: Sequence[float]) -> Ends:
    """Return the 95% percentile interval of the mean, from `RESAMPLES` draws (Efron 1979)."""
    from scipy.stats import bootstrap as resample

    drawn = resample(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        batch=RESAMPLES_AT_ONCE,
        method="percentile",
        rng=np.random.Generator(np.random.PCG64(len(values))),
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def pass_at(right: int, count: int, k: int) -> float:
    """Return the chance that k of `count` answers include a right one (Chen et al. 2021, eq. 1)."""
    assert 1 <= k <= count and 0 <= right <= count
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def majority_reward(rows: Sequence[EvaluatedRow]) -> float:
    """Return the reward of the most frequent answer, the earliest of several; 0 without any."""
    rewards = grouped((row.ballot, row.reward) for row in rows if row.ballot)
    return max(rewards.values(), key=len, default=[0.0])[0]


def means_by_problem(rows: Sequence[EvaluatedRow]) -> Figures:
    """Return the mean reward of each problem's judged answers."""
    rewards = grouped((row.prompt_id, row.reward) for row in rows if row.status != "error")
    return {name: statistics.fmean(values) for name, values in rewards.items()}


def accuracy(rows: Sequence[EvaluatedRow]) -> Accuracy | None:
    """Return the figures of an arm; None where nothing could be judged."""
    judged = [row for row in rows if row.status != "error"]
    if not judged:
        return None
    problems = list(grouped((row.prompt_id, row) for row in judged).values())
    means = list(means_by_problem(judged).values())
    families = grouped(zip((rows[0].family for rows in problems), means, strict=True))
    samples = max(map(len, problems))
    is_binary = all(row.reward in (0.0, 1.0) for row in judged)
    # Wilson's interval is for shares of single trials; means of several are resampled by problem.
    is_share = is_binary and samples == 1
    return Accuracy(
        accuracy=statistics.fmean(means),
        ci95=wilson(sum(means), len(means)) if is_share else bootstrap(means),
        interval="wilson" if is_share else "bootstrap",
        problems=len(means),
        by_family={name: statistics.fmean(each) for name, each in sorted(families.items()) if name},
        truncated_fraction=sum(row.finish == "length" for row in judged) / len(judged),
        samples=samples,
        majority=statistics.fmean(map(majority_reward, problems)) if samples > 1 else None,
        pass_at=_pass_at(problems) if is_binary and samples > 1 else {},
        chosen=_chosen(problems) if samples > 1 else {},
    )


def _chosen(problems: Sequence[Sequence[EvaluatedRow]]) -> Figures:
    """Return the mean reward of each choice over problems; empty where no answer was scored."""
    if all(row.scores is None for rows in problems for row in rows):
        return {}
    rewards = [chosen_rewards(rows) for rows in problems]
    return {name: statistics.fmean(each[name] for each in rewards) for name in CHOICES}


def _pass_at(problems: Sequence[Sequence[EvaluatedRow]]) -> Figures:
    """Return pass@k for k = 1, 2, 4, ... up to the fewest answers of a problem, that included."""
    fewest = min(map(len, problems))
    counts = [(sum(row.reward == 1.0 for row in each), len(each)) for each in problems]
    return {
        str(k): statistics.fmean(pass_at(right, count, k) for right, count in counts)
        for k in sorted({fewest, *(2**power for power in range(fewest.bit_length()))})
    }


def over_runs(accuracies: Sequence[float]) -> tuple[float, Ends]:
    """Return mean and Student's 95% interval over two or more runs that differ in their seed."""
    from scipy.stats import t

    assert len(accuracies) > 1
    mean = statistics.fmean(accuracies)
    error = statistics.stdev(accuracies) / math.sqrt(len(accuracies))
    half = float(t.ppf(0.975, len(accuracies) - 1)) * error
    return mean, (max(0.0, mean - half), min(1.0, mean + half))


def chosen_rewards(rows: Sequence[EvaluatedRow]) -> Figures:
    """Return the reward of the chosen answer to one problem, by each of CHOICES; the earliest of equals.

    Texts without an answer are not chosen; without any answer the reward is 0. A text that was not scored has score 0.
    """
    answered = [row for row in rows if row.ballot]
    if not answered:
        return dict.fromkeys(CHOICES, 0.0)
    rewards: Figures = {}
    for how in AGGREGATES:
        scores = [aggregated(row.scores or (), how) for row in answered]
        best = max(range(len(answered)), key=scores.__getitem__)
        # The ballot with the highest sum of scores, the earliest of several.
        parts = grouped(zip((row.ballot for row in answered), scores, strict=True))
        sums = {ballot: math.fsum(values) for ballot, values in parts.items()}
        winner = max(sums, key=sums.__getitem__)
        rewards[f"prm_{how}_max"] = answered[best].reward
        rewards[f"prm_{how}_vote"] = next(row.reward for row in answered if row.ballot == winner)
    return rewards


class Difference(msgspec.Struct, frozen=True):
    """Mean rewards of one arm less those of another, over the problems that both have."""

    mean: float
    ci95: Ends
    better: int
    """Problems on which the first arm has the higher mean reward."""
    worse: int
    problems: int
    chance: float
    """Exact McNemar or sign test: chance of so unequal numbers if better and worse were equally likely."""


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Compare mean rewards by problem, or return None without a common one.

    Intervals: Agresti and Min's (2005) where each reward is 0 or 1, else a percentile bootstrap over problems.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    gaps = [first[name] - second[name] for name in common]
    better = sum(gap > 0 for gap in gaps)
    worse = sum(gap < 0 for gap in gaps)
    is_binary = all(value in (0.0, 1.0) for name in common for value in (first[name], second[name]))
    if is_binary:
        ends = agresti_min(better, worse, len(gaps))
    elif min(gaps) == max(gaps):
        # Without spread: no interval of rewards in [0, 1] needs to be wider than that of a share.
        half = wilson(0.0, len(gaps))[1]
        ends = max(-1.0, gaps[0] - half), min(1.0, gaps[0] + half)
    else:
        ends = percentile_interval(gaps)
    return Difference(
        math.fsum(gaps) / len(gaps), ends, better, worse, len(gaps), sign_test(better, worse)
    )


def agresti_min(better: int, worse: int, problems: int) -> Ends:
    """Return the 95% interval: Wald's, with half a problem more in each of the four cells."""
    gap = better - worse
    total = problems + 2
    half = Z_975 * math.sqrt(better + worse + 1 - gap * gap / total) / total
    return max(-1.0, gap / total - half), min(1.0, gap / total + half)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact chance of so unequal numbers."""
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
