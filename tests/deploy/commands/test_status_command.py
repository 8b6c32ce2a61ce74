"""`prefixrl status` of runs that do not run: what happened, and what resumes them."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from prefixrl.common.errors import Halted, TrainingFault
from prefixrl.common.run.documents import END_FILE, RunEnd
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.view.run_state import is_over, state_of
from prefixrl.learner.run.directory import RunDirectory, end_noted
from support.fakes import run_on_disk
from support.models.tiny_model import save_model
from support.runs.runs_on_disk import finish, held, made, write_end


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "adapter")


def status(run: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["status", str(run), *flags], catch_exceptions=False)


def said(run: Path) -> str:
    result = status(run)
    assert result.exit_code == 0, result.output
    return result.output


def log(run: Path, text: str) -> None:
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs/learner.log").write_text(text)


def test_a_stopped_run_names_its_iteration_and_the_command_that_resumes_it(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 4)
    write_end(run, 143, "stopped as asked")
    log(run, "")
    assert (
        said(run)
        == f"stopped at iteration 4 of 10, and saved; `prefixrl resume {run}` resumes it\n"
    )
    (run / "slurm").mkdir()
    assert "`prefixrl slurm run.toml --submit` with its run file resumes it" in said(run)


def test_a_finished_run_names_its_report_and_accuracies(tmp_path: Path, adapter: Path) -> None:
    run = made(tmp_path / "Anna's run", adapter, 10)
    finish(run, 0.75)
    what, command, does = said(run).split("`")
    assert what == "finished: 10 of 10 iterations; " and does.startswith(" writes its report")
    assert shlex.split(command) == ["prefixrl", "report", str(run)], "a person can copy it"
    (run / "report.html").touch()
    assert f"report: {run}/report.html" in said(run) and "trained_adapter 0.750" in said(run)


def test_an_extended_run_is_not_finished_by_the_summary_of_its_first_end(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 10)
    finish(run, 0.75)
    assert said(run).startswith("finished") and is_over(run)
    (run / END_FILE).unlink()  # the learner of the extension was killed, or works on another host
    assert said(run).startswith("finished") and is_over(run), (
        "as a release left it that noted no end"
    )
    config = json.loads((run / "config.json").read_text())
    config["algorithm"]["iterations"] = 20
    (run / "config.json").write_text(json.dumps(config))
    actual = state_of(run)
    assert (actual.state, actual.total_iterations, actual.accuracy) == (
        "killed",
        20,
        {},
    ) and not is_over(run)


def test_a_failed_run_names_exit_code_and_cause_without_control_characters(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 3)
    write_end(run, 5, "the weights are not finite\x1b[2J")
    log(run, "some lines")
    words = said(run)
    assert words.startswith(
        "failed at iteration 3 of 10: the learner ended with exit code 5, the weights are not fin"
    )
    assert f"(see {run}/logs/learner.log)" in words and "\x1b" not in words


def test_a_killed_run_says_so_with_the_newest_line_of_its_log(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 7)
    (run / "endpoint").write_text("tcp://127.0.0.1:9")
    (run / "checkpoints/step_00000005").mkdir(parents=True)
    log(run, "first\niteration 7 waits for groups\n")
    (run / "summary.json").unlink(missing_ok=True)
    write_end(run, 1, "")
    (run / END_FILE).unlink()
    words = state_of(run)
    assert words.state == "killed" and words.exit_code is None
    text = str(words)
    assert "killed at iteration 7 of 10" in text and "iteration 7 waits for groups" in text
    assert "from its newest checkpoint (5 iterations)" in text


def test_programs_get_the_state_as_a_document(tmp_path: Path, adapter: Path) -> None:
    run = made(tmp_path / "run", adapter, 4)
    write_end(run, 143, "stopped as asked")
    actual = json.loads(status(run, "--json").output)
    assert (
        actual["state"],
        actual["iterations"],
        actual["total_iterations"],
        actual["exit_code"],
    ) == (
        "stopped",
        4,
        10,
        143,
    )


def test_a_run_that_has_ended_is_watched_to_its_end_at_once(tmp_path: Path, adapter: Path) -> None:
    run = made(tmp_path / "run", adapter, 4)
    write_end(run, 143, "stopped as asked")
    actual = status(run, "--watch")
    assert actual.exit_code == 0 and actual.output.startswith("stopped at iteration 4 of 10")


def test_an_old_end_says_nothing_of_a_learner_that_works_again(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 4)
    write_end(run, 143, "stopped as asked")
    with held(run):
        assert state_of(run).state == "running"
    assert state_of(run).state == "stopped"


def test_a_folder_that_is_no_run_is_one_message(tmp_path: Path) -> None:
    refused = status(tmp_path)
    assert refused.exit_code == 2 and str(tmp_path) in refused.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Halted("saved"), 143),
        (TrainingFault("no finite weights"), 5),
        (OSError("disk full"), 1),
        (TrainingFault("a function of the user's raised \udcff"), 5),
    ],
)
def test_a_learner_notes_how_it_ended(error: Exception, code: int, tmp_path: Path) -> None:
    directory = RunDirectory(run_on_disk(tmp_path))
    path = directory.path / END_FILE
    write_end(directory.path, 0, "of a start before")
    with pytest.raises(type(error)), end_noted(directory.path):
        assert not path.exists(), "a killed learner leaves none"
        raise error
    end = msgspec.json.decode(path.read_bytes(), type=RunEnd)
    assert end.exit_code == code and str(error).replace("\udcff", "?") in end.reason
    with end_noted(directory.path):
        pass
    assert msgspec.json.decode(path.read_bytes(), type=RunEnd).exit_code == 0
