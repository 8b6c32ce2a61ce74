"""Every setting that is accepted makes progress to the end: all small runs, counted out, under unkind schedules.

What could hold a run up for ever is a state in which no worker may start anything, nothing is under way and the learner
waits."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest

from prefixrl.common.config.algorithm import AdmissionRule
from support.broker.ledger_world import Shape, World

REPORTS = ((0.0, None), (0.5, 0.9), (0.0, 0.1), (0.0, 0.1), (0.02, 0.1))
"""Time of an iteration of one second that the learner waited, and what old samples were worth."""
SCHEDULES = ("oldest first", "newest first", "sampling first", "every third lost", "drains")


def shapes(
    over_sampling: Fraction, passing: int | None, admission: AdmissionRule
) -> Iterator[Shape]:
    """Every small B, S, item size and length of run."""
    rest = over_sampling, passing, 10**6, admission
    for batch_groups, staleness, item in product((1, 2, 3), (0, 1, 2), (1, 2, 3)):
        for iterations in (1, 2, 3):
            yield Shape(batch_groups, staleness, item, iterations, None, *rest)
        for places in (1, batch_groups, 2 * batch_groups + 1, 12):
            yield Shape(batch_groups, staleness, item, None, places, *rest)


def drive(world: World, schedule: str, slots: int) -> None:
    """One rollout and one scorer of so many slots; fails where nothing can happen any more."""
    version = 0
    for turn in range(3000):
        moved = False
        wants_swap = version < world.completed
        if wants_swap and not world.sampling:
            version, wants_swap = world.completed, False
        holds_back = wants_swap and schedule == "drains"
        while len(world.sampling) < slots and not holds_back and world.start_sampling(version):
            moved = True
        while len(world.scoring) < slots and world.start_scoring():
            moved = True
        which = -1 if schedule == "newest first" else 0
        if schedule == "every third lost" and turn % 3 == 2 and (world.sampling or world.scoring):
            world.lose((world.sampling or world.scoring).pop(which), died=False)
            moved = True
        elif world.scoring and not (schedule == "sampling first" and world.sampling):
            world.deliver_scores(world.scoring.pop(which).groups)
            moved = True
        elif world.sampling:
            world.deliver_prefixes(world.sample(world.sampling.pop(which)))
            moved = True
        if world.train():
            moved = True
            waited_s, old_ess = REPORTS[world.completed % len(REPORTS)]
            world.ledger.admission.finish_iteration(1.0, waited_s, world.ledger.states(), old_ess)
        world.check()
        if world.over:
            return
        assert moved, f"nothing can happen any more in {world.shape}, {schedule}, {slots} slots"
    raise AssertionError(f"no end in {world.shape}, {schedule}, {slots} slots")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("over_sampling", "passing", "admission"),
    [
        (Fraction(3, 2), 4, "just_in_time"),
        *(
            pytest.param(*filter_of_run, rule, marks=pytest.mark.nightly)
            for filter_of_run in ((Fraction(1), 4), (Fraction(2), 4), (Fraction(2), 10))
            for rule in ("just_in_time", "as_early_as_allowed")
        ),
        pytest.param(Fraction(1), None, "just_in_time", marks=pytest.mark.nightly),
        pytest.param(Fraction(1), None, "as_early_as_allowed", marks=pytest.mark.nightly),
        pytest.param(Fraction(3, 2), 4, "as_early_as_allowed", marks=pytest.mark.nightly),
    ],
)
def test_every_small_run_comes_to_its_end(
    over_sampling: Fraction, passing: int | None, admission: AdmissionRule
) -> None:
    runs = 0
    for shape, schedule, slots in product(
        shapes(over_sampling, passing, admission), SCHEDULES, (1, 2)
    ):
        world = World(shape)
        drive(world, schedule, slots)
        assert world.starved is None or (world.starved.why == "data" and not world.trained)
        if shape.iterations is not None:
            assert world.completed == shape.iterations
        else:
            counts = world.ledger.counts
            assert counts.trained + counts.filtered == shape.places
        if world.starved is None:
            assert world.ledger.outstanding == 0
        runs += 1
    assert runs == 27 * 7 * 10


class NoRoomForOne(World):
    """A window that lets nothing start while it is less than empty: the progress check must see it."""

    def start_sampling(self, version: int) -> bool:
        return self.ledger.outstanding == 0 and super().start_sampling(version)


def test_a_run_that_cannot_go_on_is_noticed() -> None:
    world = NoRoomForOne(Shape(3, 0, 1, 2, None))
    with pytest.raises(AssertionError, match="nothing can happen any more"):
        drive(world, "oldest first", 2)
