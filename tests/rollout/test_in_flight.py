"""A rollout whose weights change under its tasks: nothing is delivered that unproved weights had a part in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines import simulated as engine_simulated
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import GroupTask, Prompt, Sampling, TaskKind
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import (
    Beat,
    Installed,
    Prefixes,
    PrefixTask,
    Probed,
    Refused,
    RowsLeft,
    Swap,
)
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens, token_ids, token_versions
from prefixrl.rollout.loop import Rollout
from support.fakes import SteppedClock, run_on_disk, wait_until

LONG_S = 0.3
ANEW = "anew"


class Fetched:
    """Has each version as soon as it is wanted; one that was made anew has other weights."""

    def __init__(self) -> None:
        self._next: tuple[int, str] | None = None
        self.asked_again = 0

    def want_version(self, version: int, digest: str) -> None:
        self._next = version, digest

    def again(self) -> None:
        self.asked_again += 1

    def take_snapshot(self) -> Any:
        expected, self._next = self._next, None
        if expected is None:
            return None
        version, digest = expected
        return snapshot_of(version, {"weight": torch.full((4,), version + 0.5 * (digest == ANEW))})


class World:
    """A rollout with a simulated engine that takes LONG_S for a task, which pass only in its steps; what it sent."""

    def __init__(self, folder: Path, swap: str, seats: int | None = None) -> None:
        config = run_on_disk(
            folder,
            rollout={"engine": "simulated", "swap": swap},
            scorer={"engine": "simulated"},
            simulated={"prefix_s": LONG_S, "seats": seats},
        )
        self.sent: list[Any] = []
        link: Any = SimpleNamespace(send=self.sent.append, vitals=SimpleNamespace())
        engine = SimulatedEngine("rollout", config.simulated, config.rows_per_job("rollout"))
        self.fetched = Fetched()
        self.rollout = Rollout(
            config,
            link,
            engine,
            ByteRenderer(),
            self.fetched,
            config.adapter.model,  # type: ignore[arg-type]
        )

    def begin(self, name: str, version: int = 0, kind: TaskKind = "train") -> None:
        group = GroupTask(0, Prompt("p", "1 + 1", "2"), 7)
        task = PrefixTask(
            task=name,
            kind=kind,
            version=version,
            groups=(group,),
            rows_per_group=2,
            sampling=Sampling(temperature=1.0, max_new_tokens=64),
        )
        self.rollout._handle(task)

    def swap(self, version: int, digest: str = "d") -> None:
        """Announce a version and let the rollout install it, as far as it may."""
        note = WeightsNote(version, digest, pack_tokens([1, 2, 3]), pack_logprobs([0.0, 0.0]))
        self.rollout._handle(Beat(note))
        self.rollout._handle(Swap(version))
        self.turn()

    def offer(self, version: int) -> None:
        """Announce a version that the rollout then holds, without a Swap from the broker."""
        note = WeightsNote(version, "d", pack_tokens([1, 2, 3]), pack_logprobs([0.0, 0.0]))
        self.rollout._handle(Beat(note))
        self.turn()

    def turn(self) -> None:
        for result in self.rollout._engine.step(0.01):
            self.rollout._take_result(result)
        self.rollout._swap_weights()

    def turn_until(self, condition: Any, what: str) -> None:
        wait_until(lambda: (self.turn(), condition())[1], what)

    def got(self, kind: type) -> list[Any]:
        return [each for each in self.sent if isinstance(each, kind)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    clock = SteppedClock()
    monkeypatch.setattr(engine_simulated, "time", clock)
    return clock


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "in_flight")


def test_a_task_goes_on_with_the_new_weights_and_is_delivered_once_they_are_proved(
    world: World, clock: SteppedClock
) -> None:
    world.begin("a")
    clock.sleep(LONG_S / 4)
    world.swap(1)
    assert world.rollout.swap.version == 1 and len(world.got(Installed)) == 1
    world.turn_until(lambda: world.rollout._held, "the end of the task")
    assert not world.got(Prefixes)
    world.rollout._handle(Probed(version=1, outcome="proved"))
    (result,) = world.got(Prefixes)
    assert result.version == 0
    for row in result.groups[0].rows:
        assert token_versions(row).tolist() == token_ids(row.tokens).tolist()
        assert {span.version for span in row.spans} == {0, 1}
        assert len({span.weights_digest for span in row.spans}) == 2


def test_a_task_that_ended_before_the_swap_does_not_wait_for_the_proof(world: World) -> None:
    world.begin("a")
    world.turn_until(lambda: world.got(Prefixes), "the result")
    world.swap(1)
    assert world.got(Prefixes)[0].version == 0


@pytest.mark.parametrize("is_done", [False, True], ids=["still running", "done and held"])
def test_tasks_with_tokens_of_weights_that_fail_the_probe_are_handed_back(
    is_done: bool, world: World
) -> None:
    world.begin("a")
    world.swap(1)
    if is_done:
        world.turn_until(lambda: world.rollout._held, "the end of the task")
    world.rollout._handle(Probed(version=1, outcome="refused", difference=0.5, failures=1))
    world.turn_until(lambda: world.got(Refused), "the refusal")
    assert not world.got(Prefixes) and not world.rollout._open and world.fetched.asked_again == 1
    world.swap(2)
    world.rollout._handle(Probed(version=2, outcome="proved"))
    world.begin("b", version=2)
    world.turn_until(lambda: world.got(Prefixes), "the next result")
    assert len(world.got(Refused)) == 1, "later tasks have nothing to do with it"


def test_tasks_with_tokens_of_weights_that_cannot_be_proved_any_more_are_handed_back(
    world: World,
) -> None:
    """Superseded before their proof was heard: the next ones prove nothing of them."""
    world.begin("a")
    world.swap(1)
    world.swap(2)
    world.rollout._handle(Probed(version=2, outcome="proved"))
    world.turn_until(lambda: world.got(Refused), "the refusal")
    assert not world.got(Prefixes)


def test_an_evaluation_is_never_crossed(world: World) -> None:
    world.begin("e", kind="eval")
    world.swap(1)
    assert world.rollout.swap.version == 0
    world.turn_until(lambda: world.got(Prefixes), "the result")
    world.turn_until(lambda: world.rollout.swap.version == 1, "the swap")
    assert {
        span.version for row in world.got(Prefixes)[0].groups[0].rows for span in row.spans
    } == {0}


def test_draining_waits_for_the_task(tmp_path: Path) -> None:
    world = World(tmp_path, "drain")
    world.begin("a")
    world.swap(1)
    assert world.rollout.swap.version == 0
    world.turn_until(lambda: world.rollout.swap.version == 1, "the swap")
    assert [len(row.spans) for row in world.got(Prefixes)[0].groups[0].rows] == [1, 1]


@pytest.mark.parametrize("swap", ["drain", "in_flight"])
def test_a_version_that_was_made_anew_replaces_the_one_of_its_number_between_tasks(
    swap: str, tmp_path: Path
) -> None:
    """Spans name the digest of a version: two of one number in one answer could not be told apart."""
    world = World(tmp_path, swap)
    world.swap(1)
    world.rollout._handle(Probed(version=1, outcome="proved"))
    former = world.rollout.swap.digest
    world.begin("a", version=1)
    world.swap(1, ANEW)
    assert world.rollout.swap.digest == former, "a task is open"
    world.turn_until(lambda: world.rollout.swap.digest != former, "the swap")
    (result,) = world.got(Prefixes)
    assert {span.weights_digest for row in result.groups[0].rows for span in row.spans} == {former}
    first, second = world.got(Installed)
    assert (first.version, second.version) == (1, 1) and first.digest != second.digest
    world.rollout._handle(Probed(version=1, outcome="proved"))
    world.begin("b", version=1)
    world.turn_until(lambda: len(world.got(Prefixes)) == 2, "the next result")
    assert world.got(Prefixes)[1].weights_digest == second.digest


def test_an_announcement_of_what_is_installed_is_no_news(world: World) -> None:
    world.swap(1)
    digest = world.rollout.swap.digest
    world.rollout._handle(
        Beat(WeightsNote(1, digest, pack_tokens([1, 2, 3]), pack_logprobs([0.0, 0.0])))
    )
    world.rollout._handle(
        Beat(WeightsNote(0, ANEW, pack_tokens([1, 2, 3]), pack_logprobs([0.0, 0.0])))
    )
    assert world.fetched.take_snapshot() is None


def test_what_waits_for_a_seat_is_handed_back_before_a_swap_that_would_wait_for_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "drain", seats=2)
    for name, kind in (("first", "train"), ("later", "train"), ("evaluated", "eval")):
        world.begin(name, kind=kind)  # type: ignore[arg-type]
    world.offer(1)
    assert [each.task for each in world.got(Refused)] == ["later"], "evaluations need this version"
    world.turn_until(lambda: len(world.got(Prefixes)) == 2, "the others")
    assert {each.task for each in world.got(Prefixes)} == {"first", "evaluated"}


def test_ended_rows_are_reported_while_their_task_goes_on(
    tmp_path: Path, clock: SteppedClock
) -> None:
    world = World(tmp_path, "drain", seats=1)
    world.begin("a")
    clock.sleep(1.5 * LONG_S)
    world.rollout._turn()
    assert world.got(Prefixes) == [] and world.got(RowsLeft)[-1] == RowsLeft((("a", 1),))
    vitals = world.rollout._link.vitals
    assert vitals.waiting_rows == 0 and vitals.busy_row_s == pytest.approx(1.5 * LONG_S, rel=0.1)
