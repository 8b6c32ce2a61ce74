"""Thousands of unkind runs in simulated time, under both rules: every one ends, nothing is older than S.

Workers die, deliver late and install late; service times have heavy tails; the learner reports old samples to be worth
anything. The world around the ledger checks its books after every event, and reads ages and pairings from the samples
themselves."""

import random
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import pytest

from benchmarks.timed_run import TimedRun, Timing
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.ledger import SURPLUS
from support.broker.ledger_world import Shape, World

SEED = 20240
QUICK, ALL = 60, 5000


def any_report(draws: random.Random, ages: Counter[int]) -> float | None:
    """Anything from no old samples to worthless ones, whatever was trained."""
    return draws.choice((None, 0.0, 1.0, draws.random()))


def configuration(number: int) -> TimedRun:
    draws = random.Random(SEED + number)
    batch_groups, staleness = draws.choice((1, 2, 3, 8)), draws.choice((0, 1, 2, 5, 50))
    over_sampling, passing = draws.choice(
        ((1, None), (1, draws.randint(1, 9)), (1.5, draws.randint(1, 9)), (4, 3))
    )
    iterations = draws.randint(2, 12) if draws.random() < 0.5 else None
    shape = Shape(
        batch_groups=batch_groups,
        max_staleness=staleness,
        groups_per_item=draws.randint(1, 20),
        iterations=iterations,
        places=None if iterations else draws.randint(1, 57),
        over_sampling=Fraction(over_sampling),
        passing=passing,
        admission="just_in_time" if number % 4 else "as_early_as_allowed",
        min_ess=draws.choice((0.0, 0.8)),
    )
    timing = Timing(
        rollouts=draws.randint(1, 5),
        scorers=draws.randint(1, 7),
        slots=draws.randint(1, 3),
        sampling_slots=draws.randint(1, 3),
        sampling_s=draws.choice((0.01, 0.5, 3.0)),
        scoring_s=draws.choice((0.05, 1.0, 10.0)),
        training_s=draws.choice((0.0, 0.1, 2.0, 20.0)),
        sigma=draws.choice((0.0, 0.5, 1.5)),
        install_s=(0.0, draws.choice((0.0, 1.0, 30.0))),
        dying=draws.choice((0.0, 0.1, 0.4)),
        old_ess=any_report,
    )
    run = TimedRun(World(shape), timing, SEED + number)
    rule = run.world.ledger.admission
    rule.cap = draws.choice((0.0, 0.3, 1.0)) * rule.widest
    return run


def check(number: int) -> TimedRun:
    run = configuration(number).run()
    world, shape = run.world, run.world.shape
    counts = world.ledger.counts
    assert world.starved is None or (world.starved.why == "data" and not world.trained)
    assert world.ledger.outstanding == 0 or shape.passing is not None
    assert max((age for ages in run.ages for age in ages), default=0) <= shape.max_staleness
    if shape.iterations is not None:
        assert world.completed == shape.iterations
    else:
        assert counts.trained + counts.filtered + counts.failed == shape.places
    if not run.timing.dying and shape.passing is None:
        assert not counts.expired and not counts.failed
    if not run.timing.dying:
        assert set(counts.causes) <= {f"expired: {SURPLUS}", "filtered: accuracy 0"}
    return run


@pytest.mark.parametrize(
    "numbers",
    [
        range(QUICK),
        pytest.param(range(QUICK, ALL), marks=(pytest.mark.nightly, pytest.mark.timeout(1200))),
    ],
)
def test_unkind_runs_end(numbers: range) -> None:
    for number in numbers:
        try:
            check(number)
        except AssertionError as error:
            raise AssertionError(
                f"configuration {number}: {configuration(number).world.shape}"
            ) from error


class RefusesWhenIdle(Admission):
    """Fault: the lead holds where nothing is under way, so that nothing ever shortens it."""

    def size(self, wanted: int, version: int, completed: int, states: Mapping[str, int]) -> int:
        begun = sum(states.get(state, 0) for state in ("sampling", "sampled", "scoring", "scored"))
        return wanted if not self.is_active or begun + wanted <= self.lead else 0


class RefusesToSampleAgain(Admission):
    """Fault: what waits to be sampled again is refused like new work."""

    def may_resample(self, version: int, completed: int) -> bool:
        return not self.is_active or self.cap > 0


@pytest.mark.parametrize("fault", [RefusesWhenIdle, RefusesToSampleAgain])
def test_a_rule_without_what_keeps_it_going_comes_to_a_standstill(fault: type[Admission]) -> None:
    for number in range(QUICK):
        run = configuration(number)
        run.world.ledger.admission.__class__ = fault
        try:
            run.run()
        except AssertionError as error:
            assert "standstill" in str(error)
            return
    pytest.fail("every run came to its end")
