"""`prefixrl list` and `prefixrl compare`: runs in every state, from their files."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixrl.common.run.documents import SUMMARY_FILE
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.runs.report import print_table
from prefixrl.deploy.view.run_state import nothing_left as finished
from prefixrl.deploy.view.run_state import state_of
from support.models.tiny_model import save_model
from support.runs.runs_on_disk import finish, held, made, write_end


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "adapter")


def cli(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(
        main, list(map(str, arguments)), catch_exceptions=False
    )


def test_runs_that_run_stopped_ended_or_cannot_be_read_are_listed(
    tmp_path: Path, adapter: Path
) -> None:
    write_end(made(tmp_path / "a/stopped", adapter, 2), 143, "stopped as asked")
    write_end(made(tmp_path / "a/failed", adapter, 2), 5, "no finite weights")
    finish(made(tmp_path / "a/finished", adapter, 3), 0.75)
    running = made(tmp_path / "b/running", adapter, 0)
    (made(tmp_path / "b/damaged", adapter, 1) / "config.json").write_text("{")
    with held(running):
        rows = {
            line.split()[0]: line.split()[1:]
            for line in cli("list", tmp_path).output.splitlines()
            if "/" in line
        }
        assert state_of(running).state == "running"
    assert state_of(running).state == "killed", "asking takes no lock"
    assert rows["a/stopped"] == ["stopped", "2/10", "0.260"]
    assert rows["a/failed"] == ["failed", "2/10", "0.260"]
    assert rows["a/finished"] == ["finished", "3/10", "0.270", "0.750"]
    assert rows["b/running"] == ["running", "0/10"]
    assert rows["b/damaged"][0] == "unreadable:"


@pytest.mark.parametrize("name", ["summary.json", "end.json", "config.json"])
def test_a_damaged_file_of_one_run_hides_no_other(tmp_path: Path, adapter: Path, name: str) -> None:
    for each in ("good", "bad"):
        finish(made(tmp_path / each, adapter, 3), 0.75)
    (tmp_path / "bad" / name).write_bytes(b'{"\xff')
    rows = {
        line.split()[0]: line.split()[1:]
        for line in cli("list", tmp_path).output.splitlines()
        if line.split()
    }
    assert (
        rows["bad"][0] == "unreadable:"
        and name in " ".join(rows["bad"])
        and rows["good"][0] == "finished"
    )
    if name == "config.json":  # one byte within a text, which is JSON still
        good = (tmp_path / "good" / name).read_bytes()
        (tmp_path / "bad" / name).write_bytes(good.replace(b"adapter", b"\xffadapter"))
    refused = cli("compare", tmp_path / "good", tmp_path / "bad")
    assert refused.exit_code == 2 and f"bad/{name}" in refused.output


def test_a_list_for_programs_has_an_object_per_run(tmp_path: Path, adapter: Path) -> None:
    made(tmp_path / "one", adapter, 1)
    (line,) = cli("list", tmp_path, "--json").output.splitlines()
    actual = json.loads(line)
    assert (actual["state"], actual["iterations"], actual["accuracy"]) == ("killed", 1, {})


def test_a_comparison_shows_the_settings_that_differ_and_no_others(
    tmp_path: Path, adapter: Path
) -> None:
    one, two = made(tmp_path / "one", adapter, 1), made(tmp_path / "two", adapter, 2, clip=0.3)
    lines = [line.split() for line in cli("compare", one, two).output.splitlines()]
    assert ["algorithm.clip", "0.2", "0.3"] in lines
    assert ["iterations", "1", "2"] in lines
    assert not [
        line for line in lines if line and line[0] in ("algorithm.gamma", "directory", "seed")
    ]


def test_names_of_families_are_no_markup_in_a_runs_table(
    tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", adapter, 2)
    finish(run, 0.5)
    actual = json.loads((run / SUMMARY_FILE).read_text())
    actual["accuracy_ci95"] = {"trained_adapter": [0.4, 0.6]}
    actual["accuracy_by_family"] = {
        "trained_adapter": {"sets [finite]": 0.25, "[/INST] chat": 0.75}
    }
    (run / SUMMARY_FILE).write_text(json.dumps(actual))
    print_table(run)
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["sets", "[finite]", "0.25"] in rows and ["[/INST]", "chat", "0.75"] in rows, (
        "a row per family"
    )


def test_names_of_runs_cannot_move_a_terminal_and_are_no_markup(
    tmp_path: Path, adapter: Path
) -> None:
    for name in ("one", "two"):
        made(tmp_path / f"{name}[bold]\x1b[2J\u202e", adapter, 1)
    for shown in (cli("list", tmp_path).output, cli("compare", *tmp_path.iterdir()).output):
        assert "one[bold]\\u001b[2J" in shown and not set(shown) & set("\x1b\u202e")


def test_folders_without_a_run_are_one_message(tmp_path: Path) -> None:
    for command in ("list", "compare"):
        refused = cli(command, tmp_path)
        assert refused.exit_code == 2 and str(tmp_path) in refused.output


def test_the_launch_of_a_finished_run_says_that_nothing_more_is_trained(
    tmp_path: Path, adapter: Path
) -> None:
    run = made(tmp_path / "run", adapter, 10)
    finish(run, 0.75)
    assert (
        f"is finished after 10 iterations: nothing more is trained; `prefixrl resume {run} --change"
        in finished(run)
    )
    extended = json.loads((run / "config.json").read_text())
    extended["algorithm"]["iterations"] = 11
    (run / "config.json").write_text(json.dumps(extended))
    assert finished(run) == ""
    extended["algorithm"]["iterations"], extended["data"]["epochs"] = None, 1
    (run / "config.json").write_text(json.dumps(extended))
    assert "--change data.epochs=N" in finished(run)
    assert finished(made(tmp_path / "killed", adapter, 10)) == finished(tmp_path / "none") == ""
