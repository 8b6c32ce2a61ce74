"""The lines of `launch` where there is no terminal: which are due, and alarms at once."""

import re
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.documents import MetricsLine, newest_metrics
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.deploy.runs import report
from prefixrl.deploy.view import live_view
from prefixrl.deploy.view.live_view import View
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.training.figures import IterationMetrics
from support.fakes import document, run_on_disk, serving, worker_status
from support.runs.metrics_lines import metrics_line, write_metrics

TEXT = (
    "the policy has collapsed: entropy 0 nat per token (1 in the first iterations), "
    "reward 0.100 (best 0.900); go back"
)


def rung(iteration: int) -> MetricsLine:
    return msgspec.structs.replace(
        metrics_line(iteration), alarms={"entropy": f"{TEXT} from {iteration}"}
    )


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(live_view, "REFRESH_S", 0.0)
    return run_on_disk(tmp_path_factory.mktemp("long_name_of_a_folder_" * 5))


def test_every_record_is_one_line_with_the_time_and_an_alarm_is_told_at_once_and_once(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(config.directory)
    with serving(config), View(directory) as view:
        view.announce(
            "a worker ended, and this line is much longer than the eighty columns that a terminal mostly has"
        )
        lines = [metrics_line(0), metrics_line(1)]
        for line in (rung(2), rung(3), metrics_line(4), rung(5)):
            lines.append(line)
            write_metrics(directory, lines)
            view.refresh()
    said = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in said)
    assert said[0].endswith("that a terminal mostly has")
    alarms = [line[9:] for line in said if "ALARM" in line]
    assert alarms == [f"ALARM iteration {n}: {TEXT} from {n}" for n in (2, 5)]
    assert any(line[9:].startswith("it 0/5 0 % reward 0.27") and "s/it" in line for line in said)


def test_a_resumed_run_says_again_only_what_still_rings(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(config.directory)
    for before, expected in (
        ([rung(0), metrics_line(1)], 0),
        ([metrics_line(0), rung(1), rung(2)], 1),
    ):
        write_metrics(directory, before)
        with serving(config), View(directory) as view:
            view.refresh()
        assert capsys.readouterr().out.count("ALARM") == expected


def training(iteration: int, **fields: object) -> StatusDocument:
    return document(
        iteration=iteration, total_iterations=400, **{"learner_phase": "training"} | fields
    )


def due(given: list[tuple[float, StatusDocument]]) -> list[float]:
    view = View(Path("nowhere"))
    return [second for second, status in given if view._is_line_due(status, second)]


def test_a_run_that_goes_well_has_a_line_each_ten_seconds_and_one_that_waits_one_each_minute() -> (
    None
):
    assert due([(float(n), training(n)) for n in range(41)]) == [0, 10, 20, 30, 40]
    assert due([(n, training(n // 150)) for n in range(0, 301, 10)]) == [
        0,
        60,
        120,
        150,
        210,
        270,
        300,
    ]


def test_a_change_of_phase_is_told_at_once() -> None:
    phases = ("loading", "training", "waiting", "training", "publishing", "ending", "ending")
    assert due([(n / 10, training(3, learner_phase=each)) for n, each in enumerate(phases)]) == [
        0.0,
        0.1,
        0.5,
    ]


def test_a_worker_that_is_held_up_is_told_at_once_and_not_again() -> None:
    stuck = worker_status("scorer", "openai", "waiting for the endpoint", activity="waiting")
    held = document(stuck, iteration=3, total_iterations=400, learner_phase="training")
    assert due([(0.0, training(3)), (1.0, held), (2.0, held)]) == [0.0, 1.0]


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    batch = Batch(iteration=0, total_iterations=3, seed=0, groups=(), waited_s={})
    log.write(
        batch,
        IterationMetrics({"reward": 0.5}, {}, (), (), ()),
        1,
        Times(1.0, 1.0, 2.0, 0.5),
        document(),
    )
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + whole[:30])
    assert [line.iteration for line in newest_metrics(tmp_path, 5)] == [0]
    summary, lines = report.read(tmp_path)
    assert summary is None and [line.iteration for line in lines] == [0]
    (tmp_path / "metrics.jsonl").write_bytes(whole[:30])
    assert newest_metrics(tmp_path, 1) == [] and report.read(tmp_path) == (None, [])
