"""The watchdog names stopped processes, a silent broker and a run without events."""

import pytest

from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.view.stalls import Watchdog, Watched, stall_of
from support.fakes import document as fake_document
from support.fakes import worker_status

LEARNER, BROKER = Watched("learner", 10, False), Watched("broker", 11, False)


def document(idle_s: float = 0.0, phase: str = "training") -> StatusDocument:
    said = {"last_event": "iteration 4 was trained", "waiting_for": "groups"}
    return fake_document(total_iterations=9, idle_s=idle_s, learner_phase=phase, **said)


def test_a_stopped_process_is_named_after_ten_seconds_then_at_doubling_times_and_when_it_goes_on() -> (
    None
):
    dog, stopped = Watchdog(600.0), Watched("scorer-0", 12, True)
    told = {now: dog.check(now, document(), [LEARNER, BROKER, stopped]) for now in range(0, 45)}
    assert [now for now, texts in told.items() if texts] == [10, 20, 40]
    (text,) = told[20]
    assert (
        text
        == "STALL scorer-0 (pid 12) was stopped by a signal; `kill -CONT 12` lets it go on, 20 s so far"
    )
    running = Watched("scorer-0", 12, False)
    assert dog.check(50, document(), [LEARNER, BROKER, running]) == [
        "scorer-0 (pid 12) goes on after 50 s"
    ]
    assert dog.check(51, document(), [LEARNER, BROKER, running]) == []


def test_a_short_stop_is_no_news_neither_begun_nor_ended() -> None:
    dog = Watchdog(600.0)
    for now, is_stopped in ((0, True), (9, True), (9.5, False), (30, False)):
        assert (
            dog.check(now, document(), [LEARNER, BROKER, Watched("rollout-0", 12, is_stopped)])
            == []
        )


def test_a_broker_that_has_answered_and_is_silent_is_named_but_no_other() -> None:
    dog = Watchdog(600.0)
    assert dog.check(0, None, [LEARNER]) == dog.check(100, None, [LEARNER, BROKER]) == [], (
        "it reads its journal"
    )
    assert dog.check(101, document(), [LEARNER, BROKER]) == []
    assert dog.check(105, None, [LEARNER, BROKER]) == []
    (text,) = dog.check(112, None, [LEARNER, BROKER])
    assert text == "STALL broker (pid 11) has not answered for 11 s; without it nothing goes on"
    another = Watched("broker", 20, False)
    assert dog.check(113, None, [LEARNER, another]) == ["broker (pid 11) goes on after 12 s"]
    assert dog.check(200, None, [LEARNER, another]) == [], "it reads its journal"


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_broker_that_is_silent_for_long_is_a_stall_of_the_run(is_stopped: bool) -> None:
    dog, broker = Watchdog(60.0), Watched("broker", 11, is_stopped)
    dog.check(0, document(), [LEARNER, BROKER])
    stalls = []
    for now in range(1, 70):
        dog.check(now, None, [LEARNER, broker])
        stalls.append(dog.stall)
    assert stalls[58] == "" and stalls[59] == "the broker (pid 11) has not answered for 60 s"
    dog.check(71, document(), [LEARNER, BROKER])
    assert not dog.stall
    dog.check(200, None, [LEARNER, broker])
    assert not dog.stall, "the job was suspended as a whole"


def test_a_run_without_an_event_is_named_with_what_is_waited_for_and_what_came_last() -> None:
    dog = Watchdog(60.0)
    assert dog.check(0, document(59.0), [LEARNER, BROKER]) == [] and not dog.stall
    (text,) = dog.check(1, document(60.0), [LEARNER, BROKER])
    assert dog.stall and text == (
        "STALL the run makes no progress for 60 s: the learner is training; the last event: iteration 4 was trained"
    )
    assert dog.check(30, document(90.0, "waiting"), [LEARNER, BROKER]) == []
    (text,) = dog.check(61, document(120.0, "waiting"), [LEARNER, BROKER])
    assert "the learner is waiting for groups;" in text
    assert (
        dog.check(62, document(0.2), [LEARNER, BROKER]) == ["the run goes on after 121 s"]
        and not dog.stall
    )


def test_a_run_that_waits_for_its_own_limit_names_it() -> None:
    state = "waiting for scorer.openai.requests_per_minute = 3 (12 rows)"
    scorer = worker_status("scorer", "openai", state, activity="waiting")
    text = stall_of(fake_document(scorer, idle_s=90.0, learner_phase="waiting"))
    assert "scorer-0 is waiting for scorer.openai.requests_per_minute = 3 (12 rows)" in text


def test_a_job_that_was_suspended_as_a_whole_has_no_stall() -> None:
    dog = Watchdog(60.0)
    assert dog.check(0, document(), [LEARNER, BROKER]) == []
    assert dog.check(3600, document(3600.0), [LEARNER, BROKER]) == [] and not dog.stall
    assert dog.check(3650, document(3650.0), [LEARNER, BROKER]) == [] and not dog.stall
    (text,) = dog.check(3660, document(3660.0), [LEARNER, BROKER])
    assert "makes no progress" in text and dog.stall


def test_models_that_are_loaded_for_long_are_no_stall() -> None:
    loading = worker_status("scorer", "vllm", phase="loading")
    for each in (
        document(1000.0, "loading"),
        fake_document(loading, total_iterations=9, idle_s=1000.0),
    ):
        assert Watchdog(60.0).check(0, each, [LEARNER, BROKER]) == []


def test_a_run_that_only_uploads_its_last_checkpoint_has_no_stall_and_one_that_still_judges_has() -> (
    None
):
    for judged, is_stall in ((3, False), (2, True)):
        counts = {"asked": 4, "judged": judged, "failed": 1}
        each = fake_document(
            total_iterations=9, idle_s=1000.0, learner_phase="ending", evaluations=counts
        )
        assert bool(Watchdog(60.0).check(0, each, [LEARNER, BROKER])) == is_stall


def test_a_run_that_only_judges_has_no_stall() -> None:
    assert Watchdog(60.0).check(0, fake_document(idle_s=1000.0), [BROKER]) == []


def test_a_broker_of_a_run_without_a_learner_says_so() -> None:
    assert "no learner has asked for a batch yet" in stall_of(document(70.0, ""))
