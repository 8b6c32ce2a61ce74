"""The broker hears of room when it appears, and of rows in between only coarsely."""

from typing import cast

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


def test_room_is_told_with_the_row_that_makes_it() -> None:
    world = World()
    world.report(a=8, b=8)
    for left in (7, 6, 5):
        world.report(a=left, b=8)
    assert world.told == [{"a": 6}], "a quarter of the seats; with 13 rows left there is no room"
    world.report(a=3, b=8)
    assert world.told[1:] == [{"a": 3}], "room for one"


def test_a_single_row_is_told_where_it_makes_room() -> None:
    world = World(seats=16, room=15)
    world.report(a=8, b=8)
    world.report(a=8, b=7)
    assert world.told == []
    world.report(a=7, b=7)
    assert world.told == [{"a": 7, "b": 7}]


def test_a_new_task_alone_is_no_news() -> None:
    world = World()
    world.report(a=8)
    world.report(a=8, b=8)
    assert world.told == []


def test_rows_that_ended_before_the_first_report_of_their_task_are_told() -> None:
    world = World()
    world.report(a=3)
    assert world.told == [{"a": 3}]


def test_rows_that_come_back_are_told() -> None:
    world = World()
    world.report(a=1)
    world.report(a=8, b=8)
    assert world.told == [{"a": 1}, {"a": 8}]


def test_a_task_that_came_right_behind_a_report_is_told_with_the_rows_it_has_lost() -> None:
    world = World()
    world.report(a=3)
    world._report.begin("b", 8)
    world._report.report({"a": 3, "b": 4}, world.now_s + REPORT_EVERY_S / 2)
    world._begun.add("b")
    world.report(a=3, b=4)
    assert world.told == [{"a": 3}, {"b": 4}]


def test_where_a_task_takes_all_seats_nothing_is_told() -> None:
    world = World(takes_runs=True)
    world.report(a=8)
    world.report(a=1)
    assert world.told == []


def test_reports_keep_their_distance() -> None:
    world = World()
    world.report(a=8)
    world.report(a=4)
    world._report.report({"a": 1}, world.now_s + REPORT_EVERY_S / 2)
    assert world.told == [{"a": 4}]
