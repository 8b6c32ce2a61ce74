"""`prefixrl eval` before it starts anything."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import PLAN_FILE
from prefixrl.common.host.process import own
from prefixrl.deploy.commands.eval_command import (
    EvaluateOptions,
    _data,
    _plan,
    _prepare,
    _target_of,
)
from prefixrl.deploy.launch.resume import resumed
from prefixrl.learner.run.directory import RunDirectory
from support.fakes import run_on_disk
from support.models.tiny_model import run_config, save_model

OPTIONS = EvaluateOptions(
    sets=(),
    samples=0,
    is_averaged=False,
    settings=(),
    checkpoints=("4",),
    targets=(),
    arms=(),
    opening_tokens=1,
    fresh=False,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that listens at a fixed port, with one checkpoint."""
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "train.jsonl")}
    config = run_on_disk(tmp_path, data=data, broker={"listen": "tcp://10.0.0.1:5555"})
    exported = Path(config.directory) / "checkpoints/step_00000004/hf"
    exported.mkdir(parents=True)
    (exported / "model.safetensors").write_text("weights")
    (Path(config.directory) / "journal").mkdir()
    return Path(config.directory)


def test_a_checkpoint_that_is_judged_outlives_its_removal_by_the_run(run: Path) -> None:
    evaluation = _plan(run, "run", "4", OPTIONS, is_first=True)
    _prepare(evaluation, fresh=False)
    shutil.rmtree(run / "checkpoints/step_00000004")
    assert (Path(evaluation.config.adapter.model) / "model.safetensors").read_text() == "weights"
    with pytest.raises(ConfigError, match=r"removed .*step_00000004 just now.*checkpoint\.keep"):
        _prepare(evaluation, fresh=False)


def test_an_evaluation_does_not_listen_where_its_run_does_unless_it_is_told_to(run: Path) -> None:
    assert _plan(run, "run", "4", OPTIONS, True).config.broker.listen == "tcp://127.0.0.1:0"
    asked = replace(OPTIONS, settings=("broker.listen=tcp://127.0.0.1:6000",))
    assert _plan(run, "run", "4", asked, True).config.broker.listen == "tcp://127.0.0.1:6000"


@pytest.mark.parametrize("fresh", [True, False])
def test_an_evaluation_that_goes_on_is_left_alone(run: Path, fresh: bool) -> None:
    evaluation = _plan(run, "run", "4", OPTIONS, is_first=True)
    _prepare(evaluation, fresh=False)
    directory = evaluation.directory
    before = (directory / PLAN_FILE).stat().st_mtime_ns
    with own(directory), pytest.raises(ConfigError, match="another learner works in"):
        _prepare(evaluation, fresh)
    assert (directory / PLAN_FILE).stat().st_mtime_ns == before
    (directory / "answers").touch()
    _prepare(evaluation, fresh)
    assert (directory / "answers").exists() != fresh and (directory / PLAN_FILE).exists()


@pytest.mark.parametrize(
    ("given", "named"), [(("gone",), "--data 'gone'"), (("gsm8k", "gone"), "--data 'gone'")]
)
def test_problems_that_are_not_there_are_refused_by_the_flag_that_named_them(
    tmp_path: Path, given: tuple[str, ...], named: str
) -> None:
    data = run_config(save_model(tmp_path / "adapter")).data
    with pytest.raises(ConfigError) as refused:
        _data(tmp_path, data, given)
    assert str(refused.value).startswith(
        f"{named}: there is no such file or folder (looked at {Path.cwd()}/gone)"
    )


def test_an_evaluation_with_other_settings_has_a_folder_and_a_label_of_its_own(run: Path) -> None:
    usual = _plan(run, "run", "4", OPTIONS, is_first=True)
    places = replace(OPTIONS, settings=("scorer.threads=2", "broker.stall_s=70"))
    hot = replace(OPTIONS, settings=("scorer.temperature=0.3",))
    assert _plan(run, "run", "4", places, is_first=True).directory == usual.directory
    other = _plan(run, "run", "4", hot, is_first=True)
    assert other.directory.parent == usual.directory.parent != other.directory
    assert other.directory.name.startswith("step_00000004_")
    assert other.plan.label == "run (scorer.temperature=0.3)" and usual.plan.label == "run"


def test_another_target_is_named_in_folder_and_label(run: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "other")
    (tmp_path / "other.toml").write_text(
        '[target]\nmodel = "other"\n[scorer]\nmax_new_tokens = 7\n'
    )
    target = _target_of(f"big={tmp_path}/other.toml")
    plan = _plan(run, "run", "4", OPTIONS, is_first=True, target=target)
    assert plan.directory.name.startswith("step_00000004_big_")
    assert plan.plan.label == "run on big"
    assert plan.config.target is not None and plan.config.target.model == str(model)
    assert plan.config.scorer.max_new_tokens == 7


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("big", "expected NAME=FILE"),
        ("a b=x.toml", "expected NAME=FILE"),
        ("big=missing.toml", "missing.toml"),
        ("big=trains.toml", "trains.toml has algorithm; allowed are the sections target, scorer"),
    ],
)
def test_a_file_that_describes_no_target_is_refused(
    option: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains.toml").write_text("[algorithm]\niterations = 3\n")
    with pytest.raises(ConfigError, match=complaint):
        _target_of(option)


def test_nothing_trains_in_the_folder_of_an_evaluation(run: Path) -> None:
    evaluation = _plan(run, "run", "4", OPTIONS, is_first=True)
    _prepare(evaluation, fresh=False)
    folder = evaluation.directory
    with pytest.raises(ConfigError, match="holds an evaluation, in which nothing is trained"):
        RunDirectory(evaluation.config)
    RunDirectory(evaluation.config, has_plan=True)._lock.close()
    with pytest.raises(ConfigError, match="holds an evaluation, in which nothing is trained"):
        resumed(folder, ())
