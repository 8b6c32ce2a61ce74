"""`prefixrl eval` before it starts anything."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import PLAN_FILE
from prefixrl.common.host.process import own
from prefixrl.deploy.commands.eval_command import EvaluateOptions, _data, _plan, _prepare
from support.fakes import run_on_disk
from support.models.tiny_model import run_config, save_model

OPTIONS = EvaluateOptions(
    sets=(),
    samples=0,
    is_averaged=False,
    settings=(),
    checkpoints=("4",),
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
