"""The trial of a reward: its calls, what is wrong with it, and the table that `prefixrl try-reward` prints."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from prefixrl.common.config.foreign.verifier import WITH_MATHEMATICAL_GOLD
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError, PeerLost
from prefixrl.common.evaluation.trials import TriedReward, call_limit_s, try_answers
from prefixrl.common.wire.messages.groups import UNJUDGED, Prompt
from prefixrl.learner.check.tried_answers import (
    FORMS,
    GOLD,
    KEPT,
    WRONG,
    AnswerLimit,
    Case,
    chosen,
    gold_cases,
    hostile_cases,
    wrong_cases,
)

FORM_PROBLEMS, HOSTILE_PROBLEMS, CHECKED_PROBLEMS = 8, 8, 3
"""Problems by which a form is chosen, that hostile answers are given to, and that `--check` tries."""
CALLS = 2
NEARLY = 1e-9
"""Difference of rewards that rounding makes."""
SHOWN = 3
"""Most faults of a kind that are shown."""
TEXT_CHARS = 60
SLOW_SHARE = 0.5
"""Share of the limit of a call above which the time of the 95th percentile is named."""
LUCK_SHARE = 0.5
"""Least share of its problems for which a kind of hostile answers earns by more than luck."""
EDGES = (0.25, 0.5, 0.75, 1.0)
_HEAD = f"{'answers':<48}{'tried':>6}{'errors':>8}{'mean':>8}{'least':>8}{'most':>8}"


@dataclass(frozen=True)
class TriedCase:
    """A case, and its verdicts by call."""

    case: Case
    calls: tuple[TriedReward, ...]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the calls that gave one."""
        return [each.reward for each in self.calls if _has_reward(each)]

    @property
    def errors(self) -> list[TriedReward]:
        """The verdicts without a reward."""
        return [each for each in self.calls if not _has_reward(each)]

    @property
    def is_stable(self) -> bool:
        """True if every call gave the same."""
        return len(self.rewards) in (0, len(self.calls)) and self.spread <= NEARLY

    @property
    def spread(self) -> float:
        """Distance of the rewards."""
        return max(self.rewards, default=0.0) - min(self.rewards, default=0.0)


def _has_reward(verdict: TriedReward) -> bool:
    return verdict.status not in UNJUDGED


@dataclass(frozen=True)
class Bounds:
    """Bounds of the rewards of right and wrong answers."""

    least_right: float = 1.0
    most_wrong: float = 0.0


@dataclass(frozen=True)
class RewardTrial:
    """All that was tried of a reward."""

    name: str
    """The reward, as the run file names it."""
    form: str
    """Form in which answers were written."""
    cases: list[TriedCase]
    limit_s: float
    """Limit of a call."""
    bounds: Bounds = Bounds()
    is_called_again: bool = True
    """False for the verifier, which remembers its verdicts: only the first call tells its time."""
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[TriedCase]:
        """Return the cases of a kind."""
        return [each for each in self.cases if each.case.kind == kind]

    @property
    def kinds(self) -> list[str]:
        """The kinds of cases, in order."""
        return list(dict.fromkeys(each.case.kind for each in self.cases))

    @property
    def poor_golds(self) -> list[TriedCase]:
        """Gold answers that earn less than right answers must, or nothing because of an error."""
        least = self.bounds.least_right - NEARLY
        return [
            each
            for each in self.of_kind(GOLD)
            if each.errors or min(each.rewards, default=0.0) < least
        ]

    @property
    def paid_wrongs(self) -> list[TriedCase]:
        """Wrong answers that earn more than they may, and hostile ones of a kind that does so for half of its problems.

        Some hostile text is right by luck: the last number of a question may be the answer.
        """
        most = self.bounds.most_wrong + NEARLY
        paid = {
            kind: [each for each in self.of_kind(kind) if max(each.rewards, default=0.0) > most]
            for kind in self.kinds
            if kind not in (GOLD, KEPT)
        }
        return [
            each
            for kind, of_kind in paid.items()
            if kind == WRONG or len(of_kind) >= LUCK_SHARE * len(self.of_kind(kind))
            for each in of_kind
        ]

    @property
    def is_right(self) -> bool:
        """True if right answers earn enough and wrong ones not too much."""
        return not self.poor_golds and not self.paid_wrongs

    @property
    def times_s(self) -> list[float]:
        """Times of calls, sorted; without the first call of each answer, for which a child may have been started."""
        first = 1 if self.is_called_again else 0
        calls = [call for each in self.cases for call in (each.calls[first:] or each.calls)[:1]]
        return sorted(call.elapsed_s for call in calls)

    def lines(self) -> Iterator[str]:
        """Yield the table and what follows from it."""
        yield f"{self.name}; a call has {self.limit_s:g} s"
        yield f"answers are written as {self.form}"
        yield from self.notes
        yield ""
        yield _HEAD
        for kind in self.kinds:
            yield _row(kind, self.of_kind(kind))
        yield ""
        yield from self._kept_lines()
        yield from self._part_lines()
        yield self._time_line()
        yield from self._stability_lines()
        yield from self._error_lines()
        yield ""
        yield from self._verdict_lines()

    def _kept_lines(self) -> Iterator[str]:
        rewarded = [each for each in self.of_kind(KEPT) if each.rewards]
        if not rewarded:
            return
        firsts = [each.rewards[0] for each in rewarded]
        counts = Counter(map(_span, firsts))
        spans = ", ".join(
            f"{name}: {count / len(rewarded):.1%}" for name, count in sorted(counts.items())
        )
        yield f"rewards of kept answers: {spans}"
        compared = [
            (reward, each.case.earned)
            for reward, each in zip(firsts, rewarded, strict=True)
            if each.case.earned is not None
        ]
        if compared:
            same = sum(abs(now - then) <= NEARLY for now, then in compared)
            yield (
                f"{same / len(compared):.1%} of them have the reward that the run gave them; its mean was "
                f"{fmean(then for _, then in compared):.3f}"
            )
        groups: dict[int, list[float]] = defaultdict(list)
        for reward, tried_case in zip(firsts, rewarded, strict=True):
            groups[tried_case.case.group].append(reward)
        mixed = sum(max(rewards) - min(rewards) > NEARLY for rewards in groups.values())
        yield f"rewards differ in {mixed} of {len(groups)} of their groups, which alone teach"

    def _part_lines(self) -> Iterator[str]:
        parts: dict[str, list[float]] = defaultdict(list)
        for tried_case in self.cases:
            for name, part in tried_case.calls[0].parts.items():
                parts[name].append(part)
        for name, values in sorted(parts.items()):
            yield f"part {name}: {min(values):.3g} to {max(values):.3g}, mean {fmean(values):.3g}"

    def _time_line(self) -> str:
        times_s = self.times_s
        late_s = times_s[math.ceil(0.95 * len(times_s)) - 1]
        line = (
            f"time of a call: median {_time(median(times_s))}, 95th percentile {_time(late_s)}, longest "
            f"{_time(times_s[-1])}, limit {self.limit_s:g} s"
        )
        if late_s > SLOW_SHARE * self.limit_s:
            line += "; raise the limit, or a busy host loses rows"
        return line

    def _stability_lines(self) -> Iterator[str]:
        if not self.is_called_again:
            return
        unstable = [each for each in self.cases if not each.is_stable]
        if not unstable:
            yield "two calls with the same answer gave the same"
            return
        yield (
            f"two calls with the same answer differed for {len(unstable)} of {len(self.cases)}, by up to "
            f"{max(each.spread for each in unstable):.3g}: a group's rewards differ by luck, too"
        )

    def _error_lines(self) -> Iterator[str]:
        count = sum(len(each.calls) for each in self.cases)
        reasons: dict[str, list[str]] = defaultdict(list)
        for tried_case in self.cases:
            for error in tried_case.errors:
                reasons[error.fault or error.status].append(error.extracted)
        for fault, of_fault in sorted(reasons.items()):
            yield f"{fault}: {len(of_fault)} of {count} calls; the first: {of_fault[0]}"

    def _verdict_lines(self) -> Iterator[str]:
        if self.is_right:
            yield "right answers earn what they must, wrong ones no more than they may"
        if poor := self.poor_golds:
            least = math.floor(1000 * min(min(each.rewards, default=0.0) for each in poor)) / 1000
            yield (
                f"NOT RIGHT: {len(poor)} of {len(self.of_kind(GOLD))} gold answers earn less than "
                f"{self.bounds.least_right:g}. Another form of answers: --form. If it is meant so: --least-right "
                f"{least:g}"
            )
            yield from map(_case_line, poor[:SHOWN])
        if wrongs := self.paid_wrongs:
            most = math.ceil(1000 * max(max(each.rewards) for each in wrongs)) / 1000
            yield (
                f"NOT RIGHT: {len(wrongs)} wrong answers earn more than {self.bounds.most_wrong:g}. A policy that "
                f"finds such answers need not learn the task. If it is meant so: --most-wrong {most:g}"
            )
            firsts = {each.case.kind: each for each in reversed(wrongs)}
            yield from (
                _case_line(firsts[kind])
                for kind in dict.fromkeys(each.case.kind for each in wrongs)
            )


def _row(kind: str, cases: Sequence[TriedCase]) -> str:
    rewards = [reward for each in cases for reward in each.rewards]
    errors = sum(bool(each.errors) for each in cases)
    figures = [fmean(rewards), min(rewards), max(rewards)] if rewards else []
    values = "".join(f"{value:8.3f}" for value in figures) or f"{'no reward':>24}"
    return f"{kind:<48}{len(cases):>6}{errors:>8}{values}"


def _span(reward: float) -> str:
    if reward in (0.0, 1.0):
        return f"{reward:g}"
    edge = next(each for each in EDGES if reward <= each)
    return f"{edge - EDGES[0]:.2f} to {edge:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _case_line(tried_case: TriedCase) -> str:
    case, worst = tried_case.case, (tried_case.errors or tried_case.calls)[0]
    earned = worst.extracted or worst.fault if tried_case.errors else f"{worst.reward:.3g}"
    text = repr(case.answer.text[:TEXT_CHARS]) + "..." * (len(case.answer.text) > TEXT_CHARS)
    return f"  {case.prompt_id}, {case.kind}: {text} for {case.answer.gold!r:.{TEXT_CHARS}} earns {earned}"


# --- the calls ------------------------------------------------------------------------------------


def name_of(config: RunConfig) -> str:
    """Return the reward as the run file names it."""
    if config.reward.url is not None:
        return f"reward.url = {config.reward.url}"
    if config.reward.function is not None:
        return f"reward.function = {config.reward.function}"
    return "the verifier"


def limit_of(config: RunConfig) -> AnswerLimit:
    """Return the longest answer of a run."""
    is_direct = config.mode == "direct"
    return AnswerLimit(config.rollout.answer_tokens if is_direct else config.scorer.max_new_tokens)


def writable(config: RunConfig, problems: Sequence[Prompt]) -> list[Prompt]:
    """Return the problems whose gold answer is one that can be written down; raises DataError without any."""
    able = [
        each
        for each in problems
        if each.gold and (config.reward.is_own or each.code in WITH_MATHEMATICAL_GOLD)
    ]
    if not able:
        raise DataError(
            "no problem of data.train has a gold answer that can be written as an answer: they are judged by programs' "
            "tests or a package's verifier, of which this knows no right answer"
        )
    return able


def try_reward(
    config: RunConfig,
    problems: Sequence[Prompt],
    form: str | None,
    bounds: Bounds,
    kept_answers: Sequence[Case] = (),
) -> RewardTrial:
    """Call the reward of a run on answers to problems, and on kept ones; raises ConfigError or PeerLost.

    Args:
        config: the run, whose judge is asked as a scorer asks it.
        problems: the problems, whose gold answers can be written.
        form: the form of answers; None: of `FORMS` the one that earns most.
        bounds: what right and wrong answers must earn.
        kept_answers: answers of a run.
    """
    limit = limit_of(config)
    if form is None:
        form = _best_form(config, problems[:FORM_PROBLEMS], limit)
    golds = [each.gold for each in problems]
    spread = problems[:: max(1, len(problems) // HOSTILE_PROBLEMS)][:HOSTILE_PROBLEMS]
    wrong = wrong_cases(problems, form, limit)
    cases = [
        *gold_cases(problems, form, limit),
        *wrong,
        *hostile_cases(spread, golds, form, limit),
        *kept_answers,
    ]
    calls = try_answers(config, [case.answer for case in cases], CALLS)
    notes = [] if wrong else ["no two gold answers differ: none is tried as a wrong answer"]
    return RewardTrial(
        name_of(config),
        form,
        [
            TriedCase(case, verdicts)
            for case, verdicts in zip(cases, zip(*calls, strict=True), strict=True)
        ],
        call_limit_s(config),
        bounds,
        is_called_again=config.reward.is_own,
        notes=notes,
    )


def _best_form(config: RunConfig, problems: Sequence[Prompt], limit: AnswerLimit) -> str:
    """Return the form in which gold answers earn most; of equal ones the first."""
    cases = [(form, case) for form in FORMS for case in gold_cases(problems, form, limit)]
    (verdicts,) = try_answers(config, [case.answer for _, case in cases], 1, shows_stderr=False)
    earned = Counter[str]()
    for (form, _), verdict in zip(cases, verdicts, strict=True):
        earned[form] += verdict.reward if _has_reward(verdict) else 0.0  # type: ignore[assignment]
    return max(FORMS, key=lambda form: earned[form])


def check_line(config: RunConfig, problems: Sequence[Prompt]) -> str:
    """Return a line of `--check` on a reward function: a few gold answers in each form, and wrong ones."""
    limit, seed = limit_of(config), config.seed
    try:
        few = chosen(writable(config, problems), CHECKED_PROBLEMS, seed)
        cases = [
            (form, case)
            for form in FORMS
            for case in (*gold_cases(few, form, limit), *wrong_cases(few, form, limit))
        ]
        (verdicts,) = try_answers(config, [case.answer for _, case in cases], 1, shows_stderr=False)
    except (ConfigError, DataError, PeerLost) as error:
        return f"warning: reward.function could not be tried: {error}"
    by_form: dict[str, list[TriedCase]] = defaultdict(list)
    for (form, case), verdict in zip(cases, verdicts, strict=True):
        by_form[form].append(TriedCase(case, (verdict,)))
    trials = [
        RewardTrial(name_of(config), form, cases_of_form, call_limit_s(config))
        for form, cases_of_form in by_form.items()
    ]
    return _short_line(max(trials, key=_earned_by_golds))


def _earned_by_golds(trial: RewardTrial) -> float:
    return sum(sum(each.rewards) for each in trial.of_kind(GOLD))


def _short_line(trial: RewardTrial) -> str:
    golds, wrongs = (
        [r for each in trial.of_kind(kind) for r in each.rewards] for kind in (GOLD, WRONG)
    )
    errors = [error for each in trial.cases for error in each.errors]
    line = (
        f"reward.function: {len(trial.of_kind(GOLD))} gold answers, written as {trial.form}, earn {_range(golds)}, "
        f"{len(trial.of_kind(WRONG))} wrong ones {_range(wrongs)}; a call takes {_time(median(trial.times_s))}"
    )
    if errors:
        line += f"; {len(errors)} errors, the first: {errors[0].extracted}"
    # Wrong answers may have a part of the reward, but no right one's.
    is_doubtful = errors or trial.poor_golds or max(wrongs, default=0.0) >= min(golds, default=0.0)
    return f"warning: {line}; `prefixrl try-reward` tells more" if is_doubtful else line


def _range(rewards: Sequence[float]) -> str:
    if not rewards:
        return "nothing"
    least, most = min(rewards), max(rewards)
    return f"{least:.3g}" if most - least <= NEARLY else f"{least:.3g} to {most:.3g}"
