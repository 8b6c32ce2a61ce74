"""Every tracker holds the series of `metrics.jsonl`, also after iterations were trained again."""

import contextlib
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.config.learner import LogConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine, columns
from prefixrl.common.run.tracker import SampleText
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.track.command import MetricsFile, WorkingTrackers, track
from support.runs.metrics_lines import metrics_line, write_metrics
from support.runs.run_helper import ROOT, child, finish, launched, trained_iterations, wait_for

Series = dict[str, dict[int, float]]
"""Values by column and iteration."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    write_format(directory)
    (directory / "config.json").write_text(
        json.dumps({"adapter": {"model": "a"}, "rollout": {"engine": "simulated"}})
    )
    write_metrics(directory, [metrics_line(iteration) for iteration in range(3)])
    return directory


def series(lines: list[MetricsLine]) -> Series:
    results: Series = {}
    for line in lines:
        for name, value in columns(line).items():
            results.setdefault(name, {})[line.iteration] = pytest.approx(value, rel=1e-6)
    return results


def in_tensorboard(run: Path) -> Series:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in names}


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline file: a LevelDB log, in blocks of 32 KiB, after a header of 7 bytes."""
    place, record = 7, b""
    while place < len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        if not kind:
            return
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_wandb(run: Path) -> tuple[set[str], Series]:
    """Ids of the runs in the offline folders, and their history; the newest value of an iteration counts."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    ids: set[str] = set()
    rows: dict[int, dict[str, float]] = {}
    for path in sorted(
        (run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda each: each.stat().st_mtime
    ):
        for content in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "version" in row:  # a line of metrics, not a table of samples
                rows[int(row["iteration"])] = {
                    name: each for name, each in row.items() if not name.startswith("_")
                }
    results: Series = {}
    for iteration, row in rows.items():
        for name, value in row.items():
            results.setdefault(name, {})[iteration] = value
    return ids, results


def in_trackio(run: Path) -> tuple[set[str], Series]:
    """The same of its file."""
    results: Series = {}
    with contextlib.closing(sqlite3.connect(run / "trackio/tests.db")) as file:
        rows = file.execute("select run_name, step, metrics from metrics order by id").fetchall()
    for _, step, row in rows:
        for name, value in json.loads(row).items():
            results.setdefault(name, {})[step] = value
    return {name for name, _, _ in rows}, results


def in_mlflow(run: Path) -> tuple[set[str], Series]:
    """The same of its folder."""
    client = pytest.importorskip("mlflow").MlflowClient((run / "mlflow").as_uri())
    (place,) = {each.experiment_id for each in client.search_experiments() if each.name == "tests"}
    (only,) = client.search_runs([place])
    told = {name: client.get_metric_history(only.info.run_id, name) for name in only.data.metrics}
    results = {
        name.replace(".", "/"): {each.step: each.value for each in row}
        for name, row in told.items()
    }
    return {only.info.run_name}, results


class Place:
    """A tracker that fails at a line of its own."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at, self.lines, self.is_closed = fails_at, list[int](), False

    def write(self, lines: Sequence[MetricsLine]) -> None:
        for line in lines:
            if line.iteration == self.fails_at:
                raise OSError("no way there")
            self.lines.append(line.iteration)

    def samples(self, found: Sequence[SampleText]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def fails_to_begin() -> Place:
    raise ConfigError("no key")


def test_a_tracker_that_fails_leaves_the_other_alone_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = Place(), Place(fails_at=1)
    trackers = WorkingTrackers(
        {"log.none": fails_to_begin, "log.bad": lambda: bad, "log.good": lambda: good}
    )
    for iteration in range(3):
        trackers.call_all(methodcaller("write", [metrics_line(iteration)]))
    trackers.call_all(methodcaller("close"))
    assert (good.lines, bad.lines) == ([0, 1, 2], [0]) and good.is_closed and bad.is_closed
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "log.none failed, and is sent nothing until a tracker is started again: no key",
        "log.bad failed, and is sent nothing until a tracker is started again: no way there",
    ]


def test_the_failure_of_the_last_tracker_ends_it() -> None:
    with pytest.raises(ConfigError, match="no key"):
        WorkingTrackers({"log.bad": fails_to_begin})
    trackers = WorkingTrackers({"log.bad": lambda: Place(fails_at=0)})
    with pytest.raises(ConfigError, match=r"log\.bad: no way there"):
        trackers.call_all(methodcaller("write", [metrics_line(0)]))


def test_lines_that_are_appended_are_new_and_half_a_line_is_none(run: Path) -> None:
    metrics = MetricsFile(run / METRICS_FILE)
    assert [line.iteration for line in metrics.changed()] == [0, 1, 2]
    assert metrics.changed() == []
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'{"iteration"')
    assert metrics.changed() == MetricsFile(run / "none").changed() == []


def test_after_a_resume_only_lines_that_differ_are_new(run: Path) -> None:
    metrics = MetricsFile(run / METRICS_FILE)
    metrics.changed()
    write_metrics(run, [metrics_line(0), metrics_line(1)])
    assert metrics.changed() == []
    write_metrics(
        run, [metrics_line(0), metrics_line(1), metrics_line(2, reward=0.5), metrics_line(3)]
    )
    assert metrics.changed() == [metrics_line(2, reward=0.5), metrics_line(3)]


def test_nothing_to_send_to_is_refused(run: Path) -> None:
    refused = CliRunner().invoke(main, ["track", str(run)])
    assert (
        refused.exit_code == 2
        and "give one of --tensorboard, --wandb, --trackio, --mlflow" in refused.output
    )


@pytest.mark.slow
def test_tensorboard_holds_the_series_of_the_run(run: Path) -> None:
    pytest.importorskip("tensorboard")
    told = CliRunner().invoke(main, ["track", str(run), "--tensorboard"], catch_exceptions=False)
    assert told.exit_code == 0
    assert in_tensorboard(run) == series([metrics_line(iteration) for iteration in range(3)])


@pytest.mark.slow
def test_tensorboard_shows_iterations_that_were_trained_again_as_they_are_now(run: Path) -> None:
    pytest.importorskip("tensorboard")
    again = [metrics_line(0), metrics_line(1), metrics_line(2, reward=0.5), metrics_line(3)]

    def turns() -> Iterator[bool]:
        yield False
        write_metrics(run, again)
        yield False
        yield True

    turn = turns()
    track(run, LogConfig(tensorboard=True), lambda: next(turn))
    assert in_tensorboard(run) == series(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "read"), [("wandb", in_wandb), ("trackio", in_trackio), ("mlflow", in_mlflow)]
)
def test_a_tracker_holds_the_series_of_the_run_under_one_id_over_resumes(
    tracker: str,
    read: Callable[[Path], tuple[set[str], Series]],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(tracker)
    monkeypatch.setenv("TRACKIO_DIR", str(run / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (run / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    command = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "track",
        str(run),
        f"--{tracker}",
        "tests",
        "--offline",
    ]
    subprocess.run(command, check=True)
    again = [metrics_line(0), metrics_line(1), metrics_line(2, reward=0.5), metrics_line(3)]
    write_metrics(run, again)
    subprocess.run(command, check=True)
    ids, actual = read(run)
    assert len(ids) == 1
    assert actual == series(again)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_sends_its_metrics_itself_and_goes_on_after_its_learner_was_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb"), pytest.importorskip("tensorboard")
    settings = (
        "log.tensorboard=true",
        'log.wandb={project = "tests", mode = "offline"}',
        "algorithm.iterations=6",
        "algorithm.groups_per_iteration=16",
        "checkpoint.every=2",
        "evaluation.problems=32",
        "broker.silence_s=2",
    )
    run, run_file = tmp_path / "run", ROOT / "deploy/examples/arithmetic_direct/run.toml"
    with launched(run, *settings, run_file=run_file) as process:
        wait_for(lambda: trained_iterations(run) >= 3, "the third iteration")
        wait_for(lambda: child(process, "prefixrl-learner"), "the learner").send_signal(
            signal.SIGKILL
        )
        finish(process, run)
    expected = series(MetricsFile(run / METRICS_FILE).changed())
    assert len(expected["iteration"]) == 6
    assert in_tensorboard(run) == expected
    ids, actual = in_wandb(run)
    assert len(ids) == 1 and actual == expected
    assert os.listdir(run / "tensorboard")
