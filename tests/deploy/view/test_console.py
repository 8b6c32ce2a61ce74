"""The state of a run in a line, in a table of workers, and in details."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from prefixrl.common.run.documents import MetricsLine
from prefixrl.common.run.status import AdmissionStatus, StatusDocument
from prefixrl.common.wire.messages.worker import Activity, MemoryUse
from prefixrl.deploy.view.console import (
    Progress,
    in_order,
    picture,
    progress_of,
    status_line,
    workers_table,
)
from support.fakes import document, worker_status
from support.runs.metrics_lines import metrics_line


def shown(part: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pictured(status: StatusDocument, width: int = 200, progress: Progress | None = None) -> str:
    return shown(picture(status, progress or Progress()), width)


def line_of(status: StatusDocument) -> str:
    return status_line(status, Progress())


def trained_line(iteration: int = 119, **fields: Any) -> MetricsLine:
    figures = {"reward": 0.8412, "entropy": 0.13, "reference_kl": 0.0123, "actor_grad_norm": 0.326}
    changed = {
        "figures": figures | {"commonest_text_fraction": 0.43, "distinct_texts_fraction": 0.2},
        "mean_age": 1.9,
        "tokens_per_s": {"rollout": 400.0, "scorer": 1000.0, "learner": 5200.0},
        "busy_fraction": {"learner": 0.92},
    }
    return msgspec.structs.replace(metrics_line(iteration), **changed | fields)


def test_marked_fields_are_shown_as_they_are_and_zeros_are_left_out() -> None:
    status = document(queues={"scored": 4, "sampling": 2}, malformed_messages=3)
    said = pictured(status)
    assert "groups: 2 sampling, 4 scored" in said and "malformed messages: 3" in said
    assert "malformed" not in pictured(document())


LONG_WAIT: dict[str, Any] = {"learner_phase": "waiting", "learner_waits_s": 11.0}
TRAINING = document(
    iteration=120,
    total_iterations=400,
    queues={"scored": 4, "sampling": 2},
    learner_phase="training",
)


def test_a_line_has_all_that_tells_how_training_goes() -> None:
    said = status_line(TRAINING, Progress(trained_line(), 0.4))
    expected = "it 120/400 30 % reward 0.84 KL 0.012 entropy 0.13 age 1.9 1.4k tok/s 0.4 s/it training left 2 min"
    assert said == expected


def test_a_short_wait_is_not_named_and_a_long_one_is() -> None:
    waits = {
        "learner_phase": "waiting",
        "waiting_for": "groups 8 (scoring, scorer-0)",
        "total_iterations": 8,
    }
    assert line_of(document(learner_waits_s=9.0, **waits)) == "it 0/8 0 %"
    expected = "it 0/8 0 %; waiting 12 s for groups 8 (scoring, scorer-0)"
    assert line_of(document(learner_waits_s=12.3, **waits)) == expected


def test_after_training_a_line_tells_how_much_is_judged() -> None:
    counts = {"asked": 512, "judged": 96, "failed": 0}
    over = document(iteration=8, total_iterations=8, learner_phase="ending", evaluations=counts)
    assert (
        line_of(over) == "it 8/8 100 % training done; judging held-out problems, 96 of 512 judged"
    )


def test_details_show_the_mean_age_and_what_is_begun_ahead() -> None:
    admission = AdmissionStatus(
        rule="just_in_time", lead_groups=40.4, cap_groups=64.0, waited_s=0.25
    )
    said = pictured(document(total_iterations=8, window=4, mean_age=1.256, admission=admission))
    assert "mean age 1.26" in said
    assert (
        "40 groups, just in time (at most 64 beyond a batch by drift; the learner waited 0.2 s for groups)"
        in said
    )
    early = msgspec.structs.replace(admission, rule="as_early_as_allowed")
    assert "as early as the window allows" in pictured(
        document(total_iterations=8, window=4, admission=early)
    )
    assert "as early as the window allows" in pictured(
        document(total_iterations=8, window=0, admission=admission)
    )


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        pytest.param({}, "nothing asked yet", id="nothing yet"),
        pytest.param({"asked": 64, "judged": 12, "failed": 0}, "12 of 64 judged", id="some judged"),
        pytest.param(
            {"asked": 64, "judged": 12, "failed": 3}, "12 of 64 judged, 3 failed", id="some failed"
        ),
    ],
)
def test_what_trains_nothing_speaks_of_no_iteration(evaluations: dict[str, int], said: str) -> None:
    status = document(evaluations=evaluations, busy_fraction={"scorer": 0.5})
    assert line_of(status) == f"{said}; busy: scorer 50 %"
    assert "iteration" not in pictured(status) and "trained" not in pictured(status)


@pytest.mark.parametrize("activity", ["waiting", "failing"])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_words_of_a_worker_in_trouble_are_told_in_full(width: int, activity: Activity) -> None:
    state = "reward.function /home/somebody/a/long/folder/of/runs/mine.py:score: function overran 12 times; verifying 3"
    stuck = worker_status("scorer", "openai", state, activity=activity)
    for total in (0, 8):
        status = document(
            worker_status("rollout", "vllm", "version 3"), stuck, total_iterations=total
        )
        assert f"scorer-0: {state}" in line_of(status)
        assert f"scorer-0:{state}".replace(" ", "") in "".join(pictured(status, width).split())


def test_texts_without_a_verdict_are_counted_in_the_line() -> None:
    said = line_of(document(total_iterations=8, row_errors={"overran": 32}))
    assert said == "it 0/8 0 %; texts without a verdict: 32 overran"


def test_workers_that_are_still_loading_are_named() -> None:
    workers = worker_status("rollout", "vllm"), worker_status("scorer", "", phase="loading")
    assert line_of(document(*workers)) == "nothing asked yet; loading: scorer-0"
    assert line_of(document(*workers, total_iterations=8)).endswith("; loading: scorer-0")


def many_workers(count: int) -> list[Any]:
    """Workers with numbers that are as long as they become."""
    figures = {
        "version": 12345,
        "rows": 128,
        "seats": 128,
        "waiting_rows": 1024,
        "tokens_per_s": 123456.7,
    }
    figures |= {"tasks_done": 123456, "busy_fraction": 1.0}
    workers = [
        (worker_status("rollout" if index % 4 == 0 else "scorer", "vllm"), index)
        for index in range(count)
    ]
    return [
        msgspec.structs.replace(each, name=f"{each.role}-{index}", **figures)
        for each, index in workers
    ]


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_on_a_terminal_of_80_by_24_nothing_is_cut(workers: int) -> None:
    alarms = {
        "one_text": "the adapter writes one and the same text in 95% of the rows (it was 10%); a remedy"
    }
    status = document(
        *many_workers(workers), iteration=12345, total_iterations=50000, learner_phase="training"
    )
    said = shown(picture(status, Progress(trained_line(alarms=alarms), 0.4), 24), 80)
    assert len(said.splitlines()) <= 24 and max(map(len, said.splitlines())) <= 80
    assert (
        "! the adapter writes one and the same text in 95% of the rows (it was 10%)\n"
        in said.replace(" \n", "\n")
    )
    assert "\u2026" not in said and "12345/50000 25 %" in said and "training left" in said
    names = [each.name for each in status.workers]
    assert all(name in said for name in names) if workers <= 4 else "and 26 more" in said


def test_workers_are_listed_by_role_and_number() -> None:
    given = [
        msgspec.structs.replace(worker_status("scorer", "vllm"), name=f"scorer-{n}")
        for n in (10, 9, 1)
    ]
    rollout = worker_status("rollout", "vllm")
    names = ["rollout-0", "scorer-1", "scorer-9", "scorer-10"]
    assert [each.name for each in in_order([*given, rollout])] == names


def test_a_wide_table_names_host_process_engine_and_state() -> None:
    worker = worker_status("scorer", "vllm", "verifying 3")
    row = shown(workers_table([worker], is_wide=True)).splitlines()[-2]
    assert row.split() == [
        "scorer-0",
        "ready",
        "host",
        "1",
        "vllm",
        "0/1",
        "0",
        "50",
        "%",
        "0",
        "1",
        "verifying",
        "3",
    ]


def test_details_tell_what_the_learner_does() -> None:
    said = pictured(TRAINING, progress=Progress(trained_line(), 0.4))
    assert "learner: training, busy 92 %, 5.2k tokens/s" in said and "grad norm: 0.326" in said
    assert "texts: the commonest in 43 % of the rows, 20 % differ" in said
    publishes = msgspec.structs.replace(TRAINING, learner_phase="publishing")
    assert "learner: publishing" in pictured(publishes, progress=Progress(trained_line(), 0.4))
    assert "learner: saving a checkpoint" in pictured(
        publishes, progress=Progress(trained_line(), 0.4, is_saving=True)
    )


def test_details_show_the_memory_of_processes_and_of_the_workers_of_a_role_together() -> None:
    sizes = {"broker": 42, "rank-0": 1429, "rollout-0": 122, "scorer-0": 148, "scorer-1": 147}
    memory = {
        name: MemoryUse(resident_bytes=2**30, own_bytes=0, share_bytes=size * 2**20)
        for name, size in sizes.items()
    }
    expected = "memory, shared pages divided: broker 42 MiB, rank-0 1,429 MiB, rollout-0 122 MiB, 2 scorers 295 MiB"
    assert expected in pictured(document(memory=memory))
    assert "memory" not in pictured(document())


def test_a_workers_words_neither_style_nor_move_a_terminal() -> None:
    worker = worker_status(
        "scorer", "\x1b[2Jengine", state="[bold]waiting[/nothing] \x1b]0;owned\x07"
    )
    status = document(
        worker,
        total_iterations=8,
        causes={"failed: \x1b[31m": 1},
        waiting_for="[/] \x9b31m",
        **LONG_WAIT,
    )
    said = pictured(status) + shown(workers_table([worker], is_wide=True))
    assert not set(said) & set("\x1b\x07\x9b")
    assert (
        said.count("[bold]waiting[/nothing] \\u001b]0;owned\\u0007") == 2
        and "[/] \\u009b31m" in said
    )


def test_the_time_of_an_iteration_is_that_of_the_newest_ones() -> None:
    lines = [metrics_line(n) for n in range(40)]  # two seconds each
    slow = [metrics_line(40)]
    assert progress_of([], False).iteration_s is None
    assert progress_of(lines[:1], False).iteration_s == 2.0
    assert progress_of([*lines, *slow], False).iteration_s == 2.0
    assert progress_of(lines, True).newest == lines[-1]
