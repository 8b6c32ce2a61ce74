"""Lines of a run that a file watches: about every ten seconds, and at once for what changes."""

from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.view.console import Progress, Rhythm, iterations_per_line, progress_of
from support.fakes import document, worker_status
from support.runs.metrics_lines import metrics_line


def training(iteration: int, **fields: object) -> StatusDocument:
    return document(iteration=iteration, total_iterations=400, **{"learner_phase": "training"} | fields)


def test_so_many_iterations_make_a_line_that_it_takes_about_ten_seconds() -> None:
    assert [iterations_per_line(seconds) for seconds in (None, 60.0, 10.0, 4.0, 1.0, 0.4, 0.01)] == [
        1, 1, 1, 5, 10, 50, 1000,
    ]  # fmt: skip


def test_a_run_that_goes_well_has_a_line_every_so_many_iterations() -> None:
    rhythm, progress = Rhythm(), Progress(iteration_s=1.0)
    said = [n for n in range(51) if rhythm.is_due(float(n), training(n), progress)]
    assert said == [0, 10, 20, 30, 40, 50]


def test_slow_iterations_have_a_line_each_and_no_minute_is_without_one() -> None:
    rhythm, progress = Rhythm(), Progress(iteration_s=150.0)
    said = [second for second in range(0, 301, 10) if rhythm.is_due(second, training(second // 150), progress)]
    assert said == [0, 60, 120, 150, 210, 270, 300]


def test_a_change_of_phase_is_told_at_once() -> None:
    rhythm, progress = Rhythm(), Progress(iteration_s=1.0)
    phases = ("loading", "training", "waiting", "training", "publishing", "ending", "ending")
    said = [rhythm.is_due(n / 10, training(3, learner_phase=each), progress) for n, each in enumerate(phases)]
    assert said == [True, True, False, False, False, True, False]


def test_a_wait_is_told_after_ten_seconds_and_each_time_that_it_has_doubled() -> None:
    rhythm, progress = Rhythm(), Progress(iteration_s=1.0)
    rhythm.is_due(0.0, training(3), progress)
    waits = [(n, training(3, learner_phase="waiting", learner_waits_s=float(n))) for n in range(1, 59)]
    assert [n for n, each in waits if rhythm.is_due(float(n), each, progress)] == [10, 20, 40]


def test_a_worker_that_is_held_up_is_told_at_once_and_not_again() -> None:
    rhythm, progress = Rhythm(), Progress(iteration_s=1.0)
    rhythm.is_due(0.0, training(3), progress)
    for second, wanted in ((1.0, True), (2.0, False)):
        stuck = worker_status("scorer", "openai", f"waiting for the endpoint, {second:.0f} s", activity="waiting")
        status = document(stuck, iteration=3, total_iterations=400, learner_phase="training")
        assert rhythm.is_due(second, status, progress) == wanted


def test_the_time_of_an_iteration_is_that_of_the_newest_ones() -> None:
    lines = [metrics_line(n) for n in range(40)]  # two seconds each
    slow = [metrics_line(40)]
    assert progress_of([], False).iteration_s is None
    assert progress_of(lines[:1], False).iteration_s == 2.0
    assert progress_of([*lines, *slow], False).iteration_s == 2.0
    assert progress_of(lines, True).newest == lines[-1]
