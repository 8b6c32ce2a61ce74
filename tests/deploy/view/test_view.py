"""The lines of `launch` where there is no terminal: a line is a line, with the time, and alarms at once."""

import re
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.documents import MetricsLine
from prefixrl.deploy.view import live_view as status
from prefixrl.deploy.view.live_view import View
from support.fakes import run_on_disk, serving
from support.runs.metrics_lines import metrics_line, write_metrics

TEXT = (
    "the policy has collapsed: entropy 0 nat per token (1 in the first iterations), reward 0.100 (best 0.900); go back"
)


def rung(iteration: int) -> MetricsLine:
    return msgspec.structs.replace(metrics_line(iteration), alarms={"entropy": f"{TEXT} from {iteration}"})


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run_on_disk(tmp_path_factory.mktemp("long_name_of_a_folder_" * 5))


def test_every_record_is_one_line_with_the_time_and_an_alarm_is_told_at_once_and_once(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(config.directory)
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.0)
    with serving(config), View(directory) as view:
        view.announce("a worker ended, and this line is much longer than the eighty columns that a terminal mostly has")
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
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(config.directory)
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.0)
    for before, wanted in (([rung(0), metrics_line(1)], 0), ([metrics_line(0), rung(1), rung(2)], 1)):
        write_metrics(directory, before)
        with serving(config), View(directory) as view:
            view.refresh()
        assert capsys.readouterr().out.count("ALARM") == wanted
