"""The state of a run in a line and in a picture."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from prefixrl.common.run.status import AdmissionStatus, StatusDocument
from prefixrl.common.wire.messages import Batch
from prefixrl.deploy import report
from prefixrl.deploy.console import picture, plain_line
from prefixrl.deploy.status import newest_line
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.training.figures import IterationMetrics
from support.fakes import document, worker_status


def pictured(status: StatusDocument, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(status, None))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_says_where_training_stands() -> None:
    status = document(iteration=3, total_iterations=8, queues={"scored": 4, "sampling": 2})
    line = plain_line(status, None)
    assert line.startswith("iteration 3/8: ") and "2 sampling, 4 scored" in line
    assert "3 of 8" in pictured(status)


def test_a_picture_shows_the_mean_age_and_what_is_begun_ahead() -> None:
    admission = AdmissionStatus(rule="just_in_time", lead_groups=40.4, cap_groups=64.0, waited_s=0.25)
    shown = pictured(document(total_iterations=8, window=4, mean_age=1.256, admission=admission))
    assert "mean age" in shown and "1.26" in shown
    assert "40 groups, just in time (at most 64 beyond a batch by drift; the learner waited 0.2 s for groups)" in shown
    early = msgspec.structs.replace(admission, rule="as_early_as_allowed")
    assert "as early as the window allows" in pictured(document(total_iterations=8, window=4, admission=early))
    assert "as early as the window allows" in pictured(document(total_iterations=8, window=0, admission=admission))


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        ({}, "0 of 0 judged"),
        ({"asked": 64, "judged": 12, "failed": 0}, "12 of 64 judged"),
        ({"asked": 64, "judged": 12, "failed": 3}, "12 of 64 judged, 3 failed"),
    ],
)
def test_what_trains_nothing_speaks_of_no_iteration(evaluations: dict[str, int], said: str) -> None:
    status = document(evaluations=evaluations, busy_fraction={"scorer": 0.5})
    assert plain_line(status, None) == f"{said}; busy: scorer 50%"
    assert "iteration" not in pictured(status) and "trained" not in pictured(status)


def test_a_worker_that_waits_says_for_what_in_either_case() -> None:
    for state in ("waiting for the endpoint", "reward.function mine.py:f: function overran 1 times; verifying 3"):
        held_up = worker_status("scorer", "openai", state)
        for total in (0, 8):
            line = plain_line(document(held_up, total_iterations=total), None)
            assert f"scorer-0: {state}" in line


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_picture_of_any_width_says_in_full_who_waits_for_what(width: int) -> None:
    state = "reward.function /home/somebody/a/long/folder/of/runs/mine.py:score: function overran 12 times; verifying 3"
    workers = worker_status("rollout", "vllm", "version 3"), worker_status("scorer", "openai", state)
    shown = "".join(pictured(document(*workers, total_iterations=8), width).split())
    assert f"scorer-0:{state}".replace(" ", "") in shown


def test_workers_that_are_still_loading_are_named() -> None:
    workers = worker_status("rollout", "vllm"), worker_status("scorer", "", phase="loading")
    assert plain_line(document(*workers), None) == "0 of 0 judged; loading: scorer-0"
    assert plain_line(document(*workers, total_iterations=8), None).endswith("; loading: scorer-0")


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    batch = Batch(iteration=0, total_iterations=3, seed=0, groups=(), payload_groups=(), waited_s={})
    log.write(batch, IterationMetrics({"reward": 0.5}, {}, (), (), ()), 1, Times(1.0, 1.0, 2.0, 0.5), document())
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + whole[:30])
    newest = newest_line(tmp_path)
    assert newest is not None and newest.iteration == 0
    summary, lines = report.read(tmp_path)
    assert summary is None and [line.iteration for line in lines] == [0]
    (tmp_path / "metrics.jsonl").write_bytes(whole[:30])
    assert newest_line(tmp_path) is None and report.read(tmp_path) == (None, [])


def test_a_workers_words_neither_style_nor_move_a_terminal() -> None:
    worker = worker_status("scorer", "\x1b[2Jengine", state="[bold]waiting[/nothing] \x1b]0;owned\x07")
    status = document(worker, total_iterations=8, causes={"failed: \x1b[31m": 1}, waiting_for="[/] \x9b31m")
    picture = pictured(status)
    assert not set(picture) & set("\x1b\x07\x9b")
    assert "[bold]waiting[/nothing] \\u001b]0;owned\\u0007" in picture and "[/] \\u009b31m" in picture
