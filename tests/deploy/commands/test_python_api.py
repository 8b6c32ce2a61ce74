"""`import prefixrl`: a run as an object, in every state, and without writing anything."""

import functools
import importlib
import json
import re
from contextlib import suppress
from pathlib import Path

import httpx2
import msgspec
import pytest

import prefixrl
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.documents import METRICS_FILE
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands import python_api
from support.fakes import wait_until
from support.paths import ROOT
from support.runs import runs_on_disk

RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


def contents(run: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and bytes, and every folder with its time."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [run, *run.rglob("*")]
    }


def test_a_run_is_read_in_every_state_and_nothing_is_written(tmp_path: Path, adapter: Path) -> None:
    killed = runs_on_disk.made(tmp_path / "killed", adapter, 2)
    stopped = runs_on_disk.made(tmp_path / "stopped", adapter, 2)
    runs_on_disk.write_end(stopped, 143, "asked to stop")
    finished = runs_on_disk.made(tmp_path / "finished", adapter, 2)
    runs_on_disk.finish(finished, 0.75)
    for directory in (killed, stopped, finished):
        before = contents(directory)
        run = prefixrl.Run(directory)
        assert run.status()["state"] == directory.name and run.status()["iterations"] == 2
        assert [line["iteration"] for line in run.metrics()] == [0, 1]
        assert all(isinstance(value, float) for line in run.metrics() for value in line.values())
        assert (
            run.samples() == [] and run.live() is None and run.config()["algorithm"]["clip"] == 0.2
        )
        assert contents(directory) == before
    actual = prefixrl.Run(finished).summary()
    assert actual and actual["accuracy"] == {"trained_adapter": 0.75}
    assert prefixrl.Run(killed).summary() is None


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(
    tmp_path: Path, adapter: Path
) -> None:
    directory = runs_on_disk.made(tmp_path / "run", adapter, 2)
    with (directory / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 2, "fig')
    with runs_on_disk.held(directory):
        run = prefixrl.Run(directory)
        assert run.status()["state"] == "running"
        assert [line["iteration"] for line in run.metrics()] == [0, 1]


def test_a_folder_without_a_run_and_a_name_that_is_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        prefixrl.Run(tmp_path / "nothing")
    with pytest.raises(AttributeError, match="it has Run, __version__, launch"):
        prefixrl.Runs  # type: ignore[attr-defined]  # noqa: B018


def test_a_wrong_setting_ends_a_launch_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.iteration"):
        prefixrl.launch(RUN_FILE, {"directory": str(tmp_path / "run"), "algorithm.iteration": 1})
    with pytest.raises(ConfigError, match=r"algorithm\.iteration: unknown key"):
        prefixrl.launch(tree(tmp_path / "run") | {"algorithm": {"iteration": 1}})
    assert not (tmp_path / "run").exists()


def test_a_reward_is_a_function_that_other_processes_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_own.py").write_text(
        "def score(question, text, gold):\n    return 1.0\nother = lambda *_: 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine_own")
    assert python_api.reference(mine.score) == f"{tmp_path / 'mine_own.py'}:score"
    with pytest.raises(ConfigError, match=r"algorithm\.iteration: unknown key"):
        prefixrl.launch(tree(tmp_path / "run") | {"algorithm": {"iteration": 1}}, reward=mine.score)
    for no_name in (mine.other, lambda *_: 0.0, functools.partial(mine.score)):
        with pytest.raises(
            ConfigError, match="cannot import it; write it as a `def` into a file of its own"
        ):
            prefixrl.launch(tree(tmp_path / "run"), reward=no_name)


def tree(directory: Path) -> dict[str, object]:
    """The arithmetic example's beginning as a program has it, paths relative to the working folder."""
    return {
        "directory": str(directory),
        "adapter": {"model": "adapter", "init_from": None},
        "target": {"model": "target"},
        "data": {"train": [{"path": "train.jsonl"}], "eval": "heldout.jsonl"},
        "launch": {"scorers": 1},
        "rollout": {"prefix_tokens": 8},
        "scorer": {"max_new_tokens": 24},
        "log": {"dashboard": True},
        "algorithm": {"groups_per_iteration": 16, "iterations": 12, "minibatches": 1},
        "evaluation": {"problems": 16, "selection_problems": 8},
    }


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_dict_is_launched_watched_in_a_browser_stopped_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(RUN_FILE.parent)
    given, rate = tree(tmp_path / "run"), {"learner.actor_lr": 1e-3}
    run = prefixrl.launch(given, rate, wait=False)
    wait_until(lambda: len(run.metrics()) >= 2, "two iterations", 120.0)
    said = capsys.readouterr().out
    (address,) = re.findall(r"(http://127\.0\.0\.1:\d+/) shows it in a browser", said)
    assert [each["state"] for each in httpx2.get(f"{address}api/runs").json()["runs"]] == [
        "running"
    ]
    assert run.stop().status()["state"] == "stopped"
    with suppress(httpx2.ConnectError):  # another run's may listen there by now
        assert httpx2.get(f"{address}api/runs").json()["folder"] != str(tmp_path / "run")
    assert run.config()["learner"]["actor_lr"] == 1e-3 and run.config()["target"]["model"] == str(
        Path.cwd() / "target"
    )
    with pytest.raises(ConfigError, match=r"learner\.actor_lr"):
        prefixrl.launch(given, wait=False, quiet=True)
    capsys.readouterr()
    resumed = prefixrl.launch(given, rate | {"log": {"dashboard": False}}, quiet=True)
    assert (resumed.wait().status()["state"], len(resumed.metrics())) == ("finished", 12)
    assert capsys.readouterr().out == ""


def test_the_version_of_the_command_is_the_version_of_the_package() -> None:
    from click.testing import CliRunner

    assert CliRunner().invoke(main, ["--version"]).output == f"prefixrl {prefixrl.__version__}\n"


@pytest.mark.nightly
def test_the_notebook_runs_from_its_first_cell_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")
    notebook = json.loads((ROOT / "docs/python.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    run = names["run"]
    assert isinstance(run, prefixrl.Run)
    assert [line["iteration"] for line in run.metrics()] == [0, 1, 2]
    rows = run.samples()
    assert {row["iteration"] for row in rows} == {0, 1, 2} and len(rows) == 3 * 32 * 8
    assert run.samples(iteration=1) == [row for row in rows if row["iteration"] == 1]
    means = [line["figures/reward"] for line in run.metrics()]
    for iteration, mean in enumerate(means):
        rewards = [row["reward"] for row in rows if row["iteration"] == iteration]
        assert sum(rewards) / len(rewards) == pytest.approx(mean, abs=1e-6)
    assert run.status()["state"] == "finished" and run.live() is None
    msgspec.json.encode([run.status(), run.summary(), run.config()])
