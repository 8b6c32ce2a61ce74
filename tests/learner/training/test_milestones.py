"""Milestones: geometric steps, and the checkpoints that go."""

from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.training.milestones import is_milestone, milestones, removable

GROWTH = st.none() | st.floats(1.001, 10)


def test_steps_grow_by_the_factor_rounded_up() -> None:
    assert milestones(20, 2) == [1, 2, 4, 8, 16]
    assert milestones(13, 1.5) == [1, 2, 3, 5, 8, 12]
    assert milestones(0, 2) == milestones(100, None) == []


@given(st.integers(0, 200), GROWTH)
def test_an_iteration_is_a_milestone_of_every_longer_run_or_of_none(iteration: int, growth: float | None) -> None:
    assert is_milestone(iteration, growth) == (iteration in milestones(200, growth))


@given(st.integers(1, 60), st.integers(1, 5), GROWTH)
def test_after_every_step_the_newest_and_all_milestones_are_there(last: int, keep: int, growth: float | None) -> None:
    there: set[int] = set()
    for iteration in range(1, last + 1):
        there.add(iteration)
        there -= set(removable(there, keep, growth))
    assert there == set(milestones(last, growth)) | set(range(max(1, last - keep + 1), last + 1))
