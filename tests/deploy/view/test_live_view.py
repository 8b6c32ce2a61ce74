"""The state of a run in a line and in a picture."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from prefixrl.common.run.documents import MetricsLine
from prefixrl.common.run.status import AdmissionStatus, StatusDocument
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.common.wire.messages.worker import Activity, MemoryUse
from prefixrl.deploy.runs import report
from prefixrl.deploy.view.console import Progress, picture, plain_line
from prefixrl.deploy.view.live_view import newest_line
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.training.figures import IterationMetrics
from support.fakes import document, worker_status
from support.runs.metrics_lines import metrics_line


def pictured(status: StatusDocument, width: int = 200, height: int | None = None, newest: Any = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    progress = Progress(newest, 0.4 if newest else None)
    console.print(picture(status, progress, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_of(status: StatusDocument) -> str:
    return plain_line(status, Progress())


def trained_line(iteration: int = 119, **fields: Any) -> MetricsLine:
    figures = {"reward": 0.8412, "entropy": 0.13, "reference_kl": 0.0123, "actor_grad_norm": 0.326}
    changed = {
        "figures": figures | {"commonest_text_fraction": 0.43, "distinct_texts_fraction": 0.2},
        "mean_age": 1.9,
        "tokens_per_s": {"rollout": 400.0, "scorer": 1000.0, "learner": 5200.0},
        "busy_fraction": {"learner": 0.92},
    }
    return msgspec.structs.replace(metrics_line(iteration), **changed | fields)


LONG_WAIT: dict[str, Any] = {"learner_phase": "waiting", "learner_waits_s": 11.0}
TRAINING = document(iteration=120, total_iterations=400, queues={"scored": 4, "sampling": 2}, learner_phase="training")


def test_a_line_has_all_that_tells_how_training_goes() -> None:
    said = plain_line(TRAINING, Progress(trained_line(), 0.4))
    wanted = "it 120/400 30 % reward 0.84 KL 0.012 entropy 0.13 age 1.9 1.4k tok/s 0.4 s/it training left 2 min"
    assert said == wanted


def test_a_short_wait_is_not_named_and_a_long_one_is() -> None:
    waits = {"learner_phase": "waiting", "waiting_for": "groups 8 (scoring, scorer-0)", "total_iterations": 8}
    assert line_of(document(learner_waits_s=9.0, **waits)) == "it 0/8 0 %"
    assert (
        line_of(document(learner_waits_s=12.3, **waits)) == "it 0/8 0 %; waiting 12 s for groups 8 (scoring, scorer-0)"
    )


def test_after_training_a_line_tells_how_much_is_judged() -> None:
    counts = {"asked": 512, "judged": 96, "failed": 0}
    over = document(iteration=8, total_iterations=8, learner_phase="ending", evaluations=counts)
    assert line_of(over) == "it 8/8 100 % training done; judging held-out problems, 96 of 512 judged"


def test_a_picture_shows_the_mean_age_and_what_is_begun_ahead() -> None:
    admission = AdmissionStatus(rule="just_in_time", lead_groups=40.4, cap_groups=64.0, waited_s=0.25)
    shown = pictured(document(total_iterations=8, window=4, mean_age=1.256, admission=admission))
    assert "mean age 1.26" in shown
    assert "40 groups, just in time (at most 64 beyond a batch by drift; the learner waited 0.2 s for groups)" in shown
    early = msgspec.structs.replace(admission, rule="as_early_as_allowed")
    assert "as early as the window allows" in pictured(document(total_iterations=8, window=4, admission=early))
    assert "as early as the window allows" in pictured(document(total_iterations=8, window=0, admission=admission))


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        ({}, "nothing asked yet"),
        ({"asked": 64, "judged": 12, "failed": 0}, "12 of 64 judged"),
        ({"asked": 64, "judged": 12, "failed": 3}, "12 of 64 judged, 3 failed"),
    ],
)
def test_what_trains_nothing_speaks_of_no_iteration(evaluations: dict[str, int], said: str) -> None:
    status = document(evaluations=evaluations, busy_fraction={"scorer": 0.5})
    assert line_of(status) == f"{said}; busy: scorer 50 %"
    assert "iteration" not in pictured(status) and "trained" not in pictured(status)


def test_a_worker_that_waits_says_for_what_in_either_case() -> None:
    activities: tuple[Activity, ...] = ("waiting", "failing")
    for activity in activities:
        state = f"{activity} in words"
        held_up = worker_status("scorer", "openai", state, activity=activity)
        for total in (0, 8):
            assert f"scorer-0: {state}" in line_of(document(held_up, total_iterations=total))


def test_texts_without_a_verdict_are_counted_in_the_line() -> None:
    said = line_of(document(total_iterations=8, row_errors={"overran": 32}))
    assert said == "it 0/8 0 %; texts without a verdict: 32 overran"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_picture_of_any_width_says_in_full_who_waits_for_what(width: int) -> None:
    state = "reward.function /home/somebody/a/long/folder/of/runs/mine.py:score: function overran 12 times; verifying 3"
    workers = (
        worker_status("rollout", "vllm", "version 3"),
        worker_status("scorer", "openai", state, activity="failing"),
    )
    shown = "".join(pictured(document(*workers, total_iterations=8), width).split())
    assert f"scorer-0:{state}".replace(" ", "") in shown


def test_workers_that_are_still_loading_are_named() -> None:
    workers = worker_status("rollout", "vllm"), worker_status("scorer", "", phase="loading")
    assert line_of(document(*workers)) == "nothing asked yet; loading: scorer-0"
    assert line_of(document(*workers, total_iterations=8)).endswith("; loading: scorer-0")


def busy_run(count: int, engines: tuple[str, str], **fields: Any) -> StatusDocument:
    """A run in mid-flight whose texts and numbers are as long as they become."""
    workers = []
    for index in range(count):
        role = "rollout" if index % 4 == 0 else "scorer"
        state = (
            "waiting for the endpoint http://127.0.0.1:8000/v1: 429 Too Many Requests" if index == 1 else "verifying 3"
        )
        one = worker_status(role, engines[role == "scorer"], state, activity="waiting" if index == 1 else "working")
        figures = {"version": 12345, "rows": 128, "seats": 128, "waiting_rows": 1024, "tokens_per_s": 123456.7}
        more = {"name": f"{role}-{index}", "tasks_done": 123456, "busy_fraction": 1.0, "about": "an engine " * 9}
        workers.append(msgspec.structs.replace(one, **figures | more))
    usual: dict[str, Any] = {
        "iteration": 12345,
        "total_iterations": 50000,
        "queues": {"sampling": 1024, "sampled": 512, "scoring": 2048, "scored": 4096, "batched": 512},
        "learner_phase": "waiting",
        "learner_waits_s": 1234.0,
        "waiting_for": "groups 123456 (scoring, scorer-1 on a-long-host-name for 1234 s), "
        "123457 (scoring, scorer-1 on a-long-host-name for 1234 s) and 126 more",
        "evaluations": {"asked": 5120, "judged": 960, "failed": 0},
        "row_errors": {"overran": 123, "failed": 4567},
        "age_histogram": {str(age): 12345 for age in range(9)},
        "causes": {f"filtered: accuracy {n}": 12345 for n in range(6)},
    }
    return document(*workers, **usual | fields)


@pytest.mark.parametrize("engines", [("vllm", "vllm"), ("transformers", "openai")])
@pytest.mark.parametrize("workers", [1, 4, 12])
def test_on_a_terminal_of_80_by_24_nothing_is_cut(workers: int, engines: tuple[str, str]) -> None:
    alarms = {
        "one_text": "the adapter writes one and the same text in 95% of the rows, whatever is asked (it was 10%); a"
    }
    status = busy_run(workers, engines)
    console = Console(width=80, height=24, record=True, file=io.StringIO())
    console.print(picture(status, Progress(trained_line(alarms=alarms), 0.4), 80, 24))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "\u2026" not in shown and "..." not in shown
    assert "! the adapter writes one and the same text in 95% of the rows" in shown
    for said in ("12345 of 50000", "25 %", "training left", "waiting 1234 s, busy", "KL 0.0123", "grad norm 0.326"):
        assert said in shown
    header = next(line for line in lines if line.startswith("worker"))
    assert ("engine" in header) == (workers > 1 and engines[0] != engines[1])
    names = [each.name for each in status.workers] if workers <= 4 else ["3 rollouts", "9 scorers"]
    assert all(any(line.startswith(name) for line in lines) for name in names)


def test_the_learner_has_a_row_with_its_phase() -> None:
    shown = pictured(TRAINING, 80, 24, trained_line())
    assert "learner    training, busy 92 %, 5.2k tokens/s, 0.4 s per iteration" in shown
    assert "newest     reward 0.841, KL 0.0123, entropy 0.130, grad norm 0.326, age 1.90" in shown
    assert "120 of 400" in shown and "30 %  training left 2 min" in shown
    publishes = msgspec.structs.replace(TRAINING, learner_phase="publishing")
    assert "learner    publishing" in pictured(publishes, 80, 24)
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(publishes, Progress(is_saving=True), 80, 24))
    assert isinstance(console.file, io.StringIO) and "learner    saving a checkpoint" in console.file.getvalue()
    counts = {"asked": 512, "judged": 96, "failed": 0}
    ends = msgspec.structs.replace(TRAINING, iteration=400, learner_phase="ending", evaluations=counts)
    assert "learner    judging held-out problems, 96 of 512 judged" in pictured(ends, 80, 24)


def test_a_picture_shows_the_memory_of_processes_and_of_the_workers_of_a_role_together() -> None:
    sizes = {"broker": 42, "rank-0": 1429, "rollout-0": 122, "scorer-0": 148, "scorer-1": 147}
    memory = {
        name: MemoryUse(resident_bytes=2**30, own_bytes=0, share_bytes=size * 2**20) for name, size in sizes.items()
    }
    wanted = "memory, shared pages divided: broker 42 MiB, rank-0 1,429 MiB, rollout-0 122 MiB, 2 scorers 295 MiB"
    assert wanted in pictured(document(memory=memory))
    assert "memory" not in pictured(document())


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    batch = Batch(iteration=0, total_iterations=3, seed=0, groups=(), waited_s={})
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
    status = document(
        worker, total_iterations=8, causes={"failed: \x1b[31m": 1}, waiting_for="[/] \x9b31m", **LONG_WAIT
    )
    picture = pictured(status)
    assert not set(picture) & set("\x1b\x07\x9b")
    assert "[bold]waiting[/nothing] \\u001b]0;owned\\u0007" in picture and "[/] \\u009b31m" in picture
