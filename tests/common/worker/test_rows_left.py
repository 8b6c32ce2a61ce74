"""The broker hears of room when it appears, and of rows in between only coarsely."""

from typing import cast

import pytest

from prefixrl.common.wire.messages.worker import RowsLeft
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.open_tasks import REPORT_EVERY_S, RowsLeftReport


class Told:
    """A link that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[RowsLeft] = []

    def send(self, message: RowsLeft) -> None:
        self.messages.append(message)


class World:
    """A report and its clock."""

    def __init__(self, takes_runs: bool = False, seats: int = 8, room: int = 12) -> None:
        self.link, self.now_s, self._begun = Told(), 0.0, set[str]()
        self._report = RowsLeftReport(cast(Link, self.link), takes_runs, seats, room)

    def report(self, **left: int) -> None:
        """Report; a task that is new came with 8 rows."""
        for task in left.keys() - self._begun:
            self._begun.add(task)
            self._report.begin(task, 8)
        self.now_s += 2 * REPORT_EVERY_S
        self._report.report(left, self.now_s)

    @property
    def told(self) -> list[dict[str, int]]:
        return [dict(message.tasks) for message in self.link.messages]


CASES: dict[str, tuple[World, list[dict[str, int]], list[dict[str, int]]]] = {
    "a quarter of the seats, without room for another row": (
        World(),
        [{"a": 8, "b": 8}, {"a": 7, "b": 8}, {"a": 6, "b": 8}, {"a": 5, "b": 8}],
        [{"a": 6}],
    ),
    "the row that makes room": (
        World(seats=16, room=15),
        [{"a": 8, "b": 8}, {"a": 8, "b": 7}, {"a": 7, "b": 7}],
        [{"a": 7, "b": 7}],
    ),
    "a new task alone is no news": (World(), [{"a": 8}, {"a": 8, "b": 8}], []),
    "rows that ended before the first report": (World(), [{"a": 3}], [{"a": 3}]),
    "rows that come back": (World(), [{"a": 1}, {"a": 8, "b": 8}], [{"a": 1}, {"a": 8}]),
    "a task that takes all seats": (World(takes_runs=True), [{"a": 8}, {"a": 1}], []),
}


@pytest.mark.parametrize(("world", "reports", "told"), CASES.values(), ids=CASES)
def test_the_broker_is_told_of_room_and_of_many_rows(
    world: World, reports: list[dict[str, int]], told: list[dict[str, int]]
) -> None:
    for left in reports:
        world.report(**left)
    assert world.told == told


def test_a_task_that_came_right_behind_a_report_is_told_with_the_rows_it_has_lost() -> None:
    world = World()
    world.report(a=3)
    world._report.begin("b", 8)
    world._report.report({"a": 3, "b": 4}, world.now_s + REPORT_EVERY_S / 2)
    world._begun.add("b")
    world.report(a=3, b=4)
    assert world.told == [{"a": 3}, {"b": 4}]


def test_reports_keep_their_distance() -> None:
    world = World()
    world.report(a=8)
    world.report(a=4)
    world._report.report({"a": 1}, world.now_s + REPORT_EVERY_S / 2)
    assert world.told == [{"a": 4}]
