"""`prefixrl resume` goes on with a run as its directory has it; changes are recorded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import own
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.run.directory_format import write_format
from prefixrl.deploy.launch.resume import resumed
from prefixrl.deploy.runs.inspect import checked
from support.fakes import run_on_disk
from support.runs import run_helper


def begun(folder: Path) -> Path:
    """A run directory after its first start."""
    directory = Path(run_on_disk(folder).directory)
    write_format(directory)
    return directory


def test_without_changes_the_run_file_is_the_config_of_the_run(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    before = (directory / "config.json").read_bytes()
    run_file = resumed(directory, ())
    assert load(run_file).algorithm.iterations == 5
    assert load(run_file, ("launch.scorers=3",)).launch.scorers == 3
    assert (directory / "config.json").read_bytes() == before
    assert not (directory / CHANGES_FILE).exists()


def test_a_change_is_in_the_config_and_recorded_with_its_iteration(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    (directory / "checkpoints/step_00000004").mkdir(parents=True)
    config = load(resumed(directory, ("algorithm.iterations=9", "learner.actor_lr=1e-5")))
    assert (config.algorithm.iterations, config.learner.actor_lr) == (9, 1e-5)
    lines = json_lines.read(directory / CHANGES_FILE, ChangeLine)
    assert [(each.iteration, each.key, each.before, each.after) for each in lines] == [
        (4, "algorithm.iterations", 5, 9),
        (4, "learner.actor_lr", 5e-7, 1e-5),
    ]
    resumed(directory, ("algorithm.iterations=9",))
    assert len(json_lines.read(directory / CHANGES_FILE, ChangeLine)) == 2, (
        "what stays the same is no change"
    )


@pytest.mark.parametrize(
    "change", ["rollout.temperature=2", "seed=1", "algorithm.clip=0.1", "algorithm.iterations"]
)
def test_another_change_is_refused_by_name_with_those_that_are_allowed(
    tmp_path: Path, change: str
) -> None:
    directory = begun(tmp_path)
    with pytest.raises(
        ConfigError,
        match=rf"--change '{change}': .* only algorithm.iterations, data.epochs, learner",
    ):
        resumed(directory, (change,))


def test_a_wrong_value_changes_nothing(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    before = (directory / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"algorithm\.iterations"):
        resumed(directory, ("algorithm.iterations=-1",))
    assert (directory / "config.json").read_bytes() == before


def test_a_run_does_not_become_shorter_than_it_is(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    (directory / "checkpoints/step_00000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has a checkpoint of 4 iterations; 4 ends it there"):
        resumed(directory, ("algorithm.iterations=3",))
    assert load(resumed(directory, ("algorithm.iterations=4",))).algorithm.iterations == 4


def test_a_run_that_goes_on_cannot_be_changed(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    with own(directory), pytest.raises(ConfigError, match="another learner works in"):
        resumed(directory, ("algorithm.iterations=9",))


def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path: Path) -> None:
    moved = Path(shutil.move(begun(tmp_path), tmp_path / "elsewhere"))
    assert load(resumed(moved, ())).directory == str(moved)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        resumed(tmp_path / "nothing", ())


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("key", ["algorithm.iterations", "data.epochs"])
def test_a_stopped_run_is_ended_earlier(tmp_path: Path, key: str) -> None:
    directory, example = tmp_path / "run", tmp_path / "example"
    shutil.copytree(run_helper.RUN_FILE.parent, example)
    run_file = example / run_helper.RUN_FILE.name
    if key == "data.epochs":
        lines = (example / "train.jsonl").read_text().splitlines(keepends=True)
        (example / "train.jsonl").write_text("".join(lines[:64]))
        run_file.write_text(
            run_file.read_text()
            .replace("iterations = 100", "")
            .replace("[data]", "[data]\nepochs = 500")
        )
    settings = [each for each in run_helper.SMALL if "iterations" not in each]
    with run_helper.launched(
        directory, *settings, 'algorithm.admission="as_early_as_allowed"', run_file=run_file
    ) as first:
        run_helper.wait_for(
            lambda: run_helper.trained_iterations(directory) >= 5, "five iterations"
        )
        first.terminate()
        assert first.wait(60) == 130
    done = int(max((directory / "checkpoints").glob("step_????????")).name[5:])
    assert checked(directory)
    change = f"{key}={done if key == 'algorithm.iterations' else 1}"
    again = [sys.executable, "-m", "prefixrl.deploy", "resume", str(directory), "--change", change]
    ended = subprocess.run(again, capture_output=True, text=True, check=False, timeout=120.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr + run_helper.logs(directory)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["versions"] == done or key == "data.epochs"
    assert done <= summary["versions"] < done + 6, "what was under way, and no more"
    batched = summary["groups"]["outstanding"]
    assert batched in (0, 16) and summary["groups"]["issued"] == batched + sum(
        summary["groups"][each] for each in ("trained", "filtered", "failed", "expired")
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_finished_run_is_extended_and_every_group_is_trained_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with run_helper.launched(directory, *run_helper.SMALL, "algorithm.iterations=4") as first:
        assert run_helper.finish(first, directory)["versions"] == 4
    judged = (directory / "evaluations/trained_adapter.greedy.jsonl").stat().st_mtime_ns
    again = [
        sys.executable,
        "-m",
        "prefixrl.deploy",
        "resume",
        str(directory),
        "--change",
        "algorithm.iterations=8",
    ]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["versions"] == 8
    run_helper.check_books(summary, directory)
    assert checked(directory).startswith("128 groups: 128 trained; 8 iterations")
    assert (directory / "evaluations/trained_adapter.greedy.jsonl").stat().st_mtime_ns > judged
    (line,) = json_lines.read(directory / CHANGES_FILE, ChangeLine)
    assert (line.iteration, line.before, line.after) == (4, 4, 8)
    refused = subprocess.run(
        run_helper.command(directory, *run_helper.SMALL, "algorithm.iterations=4"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert f"`prefixrl resume {directory}`" in refused.stderr
