"""Credit in rows: never more than announced, never none while work waits, and nothing lost on the way."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.worker import (
    Heartbeat,
    PrefixTask,
    Refused,
    Revoke,
    RowsLeft,
    ScoreTask,
)
from prefixrl.learner.broker.workers.workers import MOST_HELD, RATE_S, Phase, Worker
from support.broker.dispatch_desk import Desk, evaluate, held_out
from support.fakes import (
    ROWS,
    endpoint_of,
    offer,
    peers,
    ready,
    run_on_disk,
    sampled,
    scored,
    serving,
    wait_until,
)

GROUPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return a_run(tmp_path_factory.mktemp("run"))


def a_run(folder: Path) -> RunConfig:
    return run_on_disk(folder, algorithm={"groups_per_iteration": GROUPS, "max_staleness": 0})


def seated(desk: Desk, role: str, seats: int, room: int) -> Worker:
    """A worker whose engine queues rows itself."""
    worker = desk.worker(role)  # type: ignore[arg-type]
    worker.seats, worker.room, worker.takes_runs = seats, room, False
    return worker


def agrees_with_its_leases(worker: Worker) -> None:
    """Compare what is counted with what a sum over the leases says."""
    leases = list(worker.leases.values())
    assert worker.rows == sum(each.rows for each in leases) and worker.open_rows == sum(
        each.open_rows for each in leases
    )
    # A task is given whole: the last one may go beyond the room, by less than its rows.
    largest = max((each.rows for each in leases), default=0)
    assert worker.rows <= MOST_HELD * worker.room + largest
    ahead, behind = 0, []
    for lease in leases:
        if ahead >= worker.seats and lease.open_rows:
            behind.append(lease)
        ahead += lease.open_rows
    assert worker.behind() == behind


def test_rows_are_given_until_the_room_is_full_and_again_as_soon_as_one_has_ended(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    scorer = seated(desk, "scorer", 2 * ROWS, 3 * ROWS)
    desk.dispatch()
    tasks = desk.tasks(scorer, ScoreTask)
    assert [len(task.groups) for task in tasks] == [1, 1, 1] and scorer.free == 0
    desk.dispatch()
    assert not desk.tasks(scorer, ScoreTask), "nothing is prefetched beyond the room"
    scorer.rows_left(tasks[1].task, ROWS - 1)
    desk.dispatch()
    assert len(desk.tasks(scorer, ScoreTask)) == 1 and scorer.free == 1 - ROWS
    scorer.rows_left(tasks[1].task, ROWS)  # an older report, or a lie: the credit is taken again
    assert scorer.free == -ROWS


def test_the_credit_of_ended_rows_does_not_return_a_second_time_with_the_result(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    scorer = seated(desk, "scorer", ROWS, ROWS)
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    scorer.rows_left(task.task, 0)
    assert scorer.free == ROWS
    desk.dispatcher.take_scores(scorer, scored(task), 1.0)
    assert scorer.free == ROWS
    scorer.rows_left(task.task, 0)  # it crossed the result on the way
    assert scorer.free == ROWS


def test_a_worker_that_says_that_all_rows_have_ended_gets_a_few_times_its_room_and_no_more(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    liar = seated(desk, "scorer", ROWS, ROWS)
    for _ in range(GROUPS):
        desk.dispatch()
        for task in list(liar.leases):
            liar.rows_left(task, 0)
    assert len(liar.leases) == MOST_HELD


def test_runs_of_groups_stay_whole_for_an_engine_that_needs_them_and_are_cut_for_others(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    runs, apart = desk.worker("rollout"), seated(desk, "rollout", ROWS, ROWS)
    desk.dispatch()
    (whole,), (one,) = desk.tasks(runs, PrefixTask), desk.tasks(apart, PrefixTask)
    assert (len(whole.groups), len(one.groups)) == (2, 1)
    desk.dispatcher.take_prefixes(runs, sampled(whole), 1.0)
    scorer = seated(desk, "scorer", ROWS, ROWS)
    desk.dispatch()
    (first,) = desk.tasks(scorer, ScoreTask)
    assert [each.seq for each in first.groups] == [whole.groups[0].seq]
    other = desk.worker("scorer")
    desk.dispatch()
    (second,) = desk.tasks(other, ScoreTask)
    assert [each.seq for each in second.groups] == [whole.groups[1].seq], (
        "the rest of the run, in its order"
    )
    desk.ledger.check()


def test_an_engine_of_runs_gets_one_task_ahead_also_beside_one_whose_room_is_full(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    apart, runs = seated(desk, "scorer", ROWS, ROWS), desk.worker("scorer")
    desk.dispatch()
    assert len(desk.tasks(apart, ScoreTask)) == 1 and apart.free == 0
    assert len(desk.tasks(runs, ScoreTask)) == 2 and runs.free == -1


def test_evaluations_are_scored_a_group_at_a_time_too(config: RunConfig) -> None:
    desk = Desk(config)
    rollout = desk.worker("rollout")
    rollout.phase = Phase.DRAINING
    evaluate(desk, 0, held_out(5))
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    desk.dispatcher.take_prefixes(rollout, sampled(task), 1.0)
    scorer = seated(desk, "scorer", 2, 3)
    judged = 0
    while judged < 5:
        desk.dispatch()
        given_out = desk.tasks(scorer, ScoreTask)
        assert (
            given_out and all(len(each.groups) == 1 for each in given_out) and scorer.open_rows <= 3
        )
        for each in given_out:
            desk.dispatcher.take_scores(scorer, scored(each), 1.0)
            judged += 1
    assert desk.dispatcher.evaluations.counts() == {"asked": 5, "judged": 5, "failed": 0}


def test_groups_of_a_scorer_that_is_lost_in_mid_task_are_scored_by_another_in_their_order(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    groups = desk.sample_everything(desk.worker("rollout"))
    dying = seated(desk, "scorer", 2 * ROWS, 3 * ROWS)
    desk.dispatch()
    begun = desk.tasks(dying, ScoreTask)
    dying.rows_left(begun[0].task, 1)
    desk.dispatcher.lose_worker(dying, "silent", died=True)
    assert (dying.rows, dying.open_rows, dying.free) == (0, 0, 3 * ROWS)
    desk.ledger.check()
    other, order = seated(desk, "scorer", 2 * ROWS, 3 * ROWS), []
    while len(order) < groups:
        desk.dispatch()
        for task in desk.tasks(other, ScoreTask):
            order.append(task.groups[0].seq)
            desk.dispatcher.take_scores(other, scored(task), 1.0)
    assert order == list(range(groups))


def test_an_idle_scorer_gets_what_waits_for_seats_elsewhere_but_nothing_that_it_could_not_seat(
    config: RunConfig,
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    full = seated(desk, "scorer", GROUPS * ROWS - ROWS, 2 * GROUPS * ROWS)
    desk.dispatch()
    waiting = desk.tasks(full, ScoreTask)[-1]
    newcomer = seated(desk, "scorer", ROWS, 2 * ROWS)
    desk.dispatch()
    desk.dispatch()
    assert desk.tasks(full, Revoke) == [Revoke(waiting.task)], "that alone, and once"
    desk.dispatcher.take_refusal(full, Refused(waiting.task, "revoked"))
    desk.dispatch()
    (task,) = desk.tasks(newcomer, ScoreTask)
    assert task.groups == waiting.groups
    for _ in range(3):
        desk.dispatch()
    assert not desk.tasks(newcomer, Revoke) and not desk.tasks(full, Revoke), (
        "it does not go back and forth"
    )


def test_a_leaving_scorer_gets_nothing_however_many_of_its_rows_end(config: RunConfig) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    scorer = seated(desk, "scorer", ROWS, ROWS)
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    scorer.is_leaving = True
    scorer.rows_left(task.task, 0)
    desk.dispatch()
    assert not desk.tasks(scorer, ScoreTask)
    desk.dispatcher.take_scores(scorer, scored(task), 1.0)
    assert not scorer.leases


@settings(max_examples=30)
@given(draws=st.randoms(use_true_random=False))
def test_credit_is_never_exceeded_and_no_seat_is_free_while_work_waits(
    config: RunConfig, draws: random.Random
) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    scorers: list[Worker] = []
    held: dict[str, tuple[Worker, ScoreTask]] = {}
    done: set[int] = set()
    for _ in range(200):
        if len(done) == GROUPS:
            break
        act = draws.choice(["end rows", "end rows", "result", "result", "lose", "join", "refuse"])
        if act == "join" and len(scorers) < 3:
            seats = draws.randint(1, 3 * ROWS)
            scorers.append(seated(desk, "scorer", seats, draws.randint(seats, 2 * seats)))
        elif act == "lose" and scorers and draws.random() < 0.3:
            lost = scorers.pop(draws.randrange(len(scorers)))
            desk.dispatcher.lose_worker(lost, "gone", died=False)
            held = {name: each for name, each in held.items() if each[0] is not lost}
        elif held:
            name = draws.choice(list(held))
            worker, task = held[name]
            if act == "end rows":
                worker.rows_left(name, draws.randint(0, ROWS))
            elif act == "refuse":
                desk.dispatcher.take_refusal(worker, Refused(name, "revoked"))
                del held[name]
            elif act == "result":
                desk.dispatcher.take_scores(worker, scored(task), desk.now_s)
                done.update(group.seq for group in task.groups)
                del held[name]
        before = {worker.name: worker.free for worker in scorers}
        desk.dispatch()
        for worker in scorers:
            given_out = desk.tasks(worker, ScoreTask)
            assert not given_out or before[worker.name] > 0, "no credit, no task"
            assert before[worker.name] - sum(len(task.groups) * ROWS for task in given_out) >= min(
                before[worker.name], 1 - ROWS
            ), "beyond the room by less than a task"
            held |= {task.task: (worker, task) for task in given_out}
            agrees_with_its_leases(worker)
            assert worker.free <= 0 or not desk.ledger.states().get("sampled"), (
                "a seat is free while work waits"
            )
        desk.ledger.check()
    else:
        assert len(done) < GROUPS  # few results were drawn
    assert desk.ledger.states().get("scored", 0) == len(done)


def test_the_share_is_the_true_one_when_one_row_of_32_runs_on(config: RunConfig) -> None:
    desk = Desk(config)
    desk.sample_everything(desk.worker("rollout"))
    scorer = seated(desk, "scorer", 32, 48)
    desk.dispatch()
    began_s = desk.now_s
    # 31 rows end after a second, the last one after ten.
    beat = Heartbeat(
        progress=1, busy_row_s=31 * 1.0 + 1 * 10.0, leases=(), state="", waiting_rows=5, tokens=410
    )
    scorer.heartbeat(beat, began_s + 10.0)
    assert scorer.busy_fraction == pytest.approx(41 / 320) and scorer.waiting_rows == 5


def test_tokens_per_second_are_those_of_the_newest_seconds(config: RunConfig) -> None:
    worker = Desk(config).worker("scorer")
    for now_s, tokens, expected in (
        (100.0, 50, 0.0),
        (100.0 + RATE_S / 2, 500, 0.0),
        (100.0 + RATE_S, 550, 500 / RATE_S),
        (100.0 + 2 * RATE_S, 550, 0.0),
        (101.0 + 2 * RATE_S, 3, 0.0),
        (101.0 + 3 * RATE_S, 13, 10 / RATE_S),
    ):
        worker.heartbeat(
            Heartbeat(progress=1, busy_row_s=0.0, leases=(), state="", tokens=tokens), now_s
        )
        assert worker.tokens_per_s == pytest.approx(expected)


def test_ended_rows_bring_the_next_task_over_a_real_socket(tmp_path: Path) -> None:
    config = a_run(tmp_path)
    with serving(config) as broker, peers(endpoint_of(config), "writer") as (writer,):
        writer.join("rollout")
        loaded = ready(config, "rollout")
        writer.say(offer(ROWS, loaded.digests, "fake", 0, "d0", takes_runs=False))
        task = writer.hear(PrefixTask)
        assert len(task.groups) == 1 and writer.hears_nothing_of(PrefixTask)
        writer.say(RowsLeft(((task.task, ROWS - 1), ("unknown", 0))))
        assert writer.hear(PrefixTask).groups[0].seq == task.groups[0].seq + 1
        (worker,) = broker.dispatcher.registry.workers_of("rollout")
        wait_until(lambda: worker.open_rows == 2 * ROWS - 1, "its rows")
