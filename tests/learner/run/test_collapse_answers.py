"""Answers to a collapse are carried out on the models, written down once, and found again by a resumed learner."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import CHANGES_FILE, ChangeLine
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.learner.models.model import Models
from prefixrl.learner.run.collapse import Collapse
from prefixrl.learner.run.collapse_answers import CollapseAnswers
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config, save_model

pytestmark = DEEPSPEED_WARNINGS
FIGURES = [(0.5, 1.0)] * 6 + [(0.1, 0.01)] * 8
"""Reward and entropy of each iteration: a collapse from the sixth on."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapter"), is_tied=True)


def config_of(adapter: Path, on_collapse: str) -> RunConfig:
    return run_config(adapter, algorithm={"on_collapse": on_collapse, "entropy": 0.02})


def figures(iteration: int) -> tuple[Batch, IterationMetrics]:
    reward, entropy = FIGURES[iteration]
    batch = Batch(iteration=iteration, total_iterations=20, seed=0, groups=(), waited_s={})
    return batch, IterationMetrics({"reward": reward, "entropy": entropy}, {}, (), (), ())


def weights(models: Models) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in models.actor.masters().items()}


class Run:
    """A learner's iterations, each with a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        trained: int = 0,
        returns: Mapping[int, int] = {},
    ) -> None:
        """`trained`: iterations of an earlier start."""
        algorithm = config.algorithm
        self.directory = directory
        self.models = Models.load(config, 0, 1, config.adapter.model)
        checkpoint.load(directory / "checkpoints", self.models)
        collapse = Collapse(algorithm.on_collapse, algorithm.entropy)
        for iteration in range(trained):
            collapse.add_iteration(iteration, figures(iteration)[1].means)
        self.answers = CollapseAnswers(config, directory, self.models, collapse, returns=returns)

    def train(self, first: int, last: int) -> None:
        (self.directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        for iteration in range(first, last):
            train_iteration(self.models, random_iteration(iteration), self.answers.config, 20)
            self.answers.answer_iteration(*figures(iteration), version=iteration + 1)
            state = TrainerState(iteration + 1, self.models.optimizer_steps, 1)
            checkpoint.save(self.directory / "checkpoints", self.models, state)


def changes(directory: Path) -> list[tuple[int, str, object, object]]:
    lines = json_lines.read(directory / CHANGES_FILE, ChangeLine)
    assert all("the policy has collapsed" in line.reason for line in lines)
    return [(line.iteration, line.key, line.before, line.after) for line in lines]


def ways_back(directory: Path) -> dict[int, object]:
    return {line[0]: line[3] for line in changes(directory) if line[1] == "version of the weights"}


@pytest.mark.slow
def test_a_replay_goes_back_where_its_run_went_though_a_later_checkpoint_is_there(
    adapter: Path, tmp_path: Path
) -> None:
    config = config_of(adapter, "go_back")
    run = Run(config, tmp_path / "run")
    run.train(0, 14)
    ((version, good),) = ways_back(tmp_path / "run").items()
    assert isinstance(good, int) and good > 2
    replay = Run(config, tmp_path / "replay", returns={version: 2})
    replay.train(0, 14)
    assert ways_back(tmp_path / "replay") == {version: 2}
    assert replay.answers.way_back >= {2}, "nothing removes it"
    elsewhere = Run(config, tmp_path / "elsewhere", returns={version + 5: 2})
    elsewhere.train(0, 14)
    assert ways_back(tmp_path / "elsewhere") == {version: good}, "its own answer, its own way"


def test_going_back_takes_the_weights_before_the_fall_and_half_the_rates(
    adapter: Path, tmp_path: Path
) -> None:
    run = Run(config_of(adapter, "go_back"), tmp_path)
    run.train(0, 14)
    (version, good) = next(
        (line[0], line[3]) for line in changes(tmp_path) if line[1] == "version of the weights"
    )
    assert isinstance(good, int) and good <= 6 < version
    assert changes(tmp_path) == [
        (version, "scale of the learning rates", 1.0, 0.5),
        (version, "version of the weights", version, good),
    ]
    saved = [
        weights(Run(config_of(adapter, "warn"), only(tmp_path, step)).models)
        for step in (good, version)
    ]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert run.models.actor.rate_scale == 0.5


def only(directory: Path, step: int) -> Path:
    """A directory with one of the checkpoints alone."""
    alone = directory.parent / f"{directory.name}-{step}"
    (alone / "checkpoints").mkdir(parents=True)
    name = f"step_{step:08d}"
    (alone / "checkpoints" / name).symlink_to(directory / "checkpoints" / name)
    return alone


def test_a_larger_bonus_holds_in_a_resumed_run_and_is_written_down_once(
    adapter: Path, tmp_path: Path
) -> None:
    config = config_of(adapter, "raise_entropy")
    run = Run(config, tmp_path)
    run.train(0, 14)
    (change,) = changes(tmp_path)
    assert change[1:] == ("algorithm.entropy", 0.02, 0.08)
    assert run.answers.config.algorithm.entropy == 0.08
    resumed = Run(config, tmp_path, trained=14)
    assert resumed.answers.config.algorithm.entropy == 0.08
    again = Run(config, tmp_path, trained=change[0] - 1)
    again.answers.answer_iteration(*figures(change[0] - 1), version=change[0])
    assert changes(tmp_path) == [change]


def test_without_an_earlier_checkpoint_the_rates_fall_alone(adapter: Path, tmp_path: Path) -> None:
    run = Run(config_of(adapter, "go_back"), tmp_path)
    for iteration in range(14):
        run.answers.answer_iteration(*figures(iteration), version=iteration + 1)
    assert [line[1] for line in changes(tmp_path)] == ["scale of the learning rates"]


def test_the_way_back_is_the_newest_checkpoint_before_the_fall(
    adapter: Path, tmp_path: Path
) -> None:
    run = Run(config_of(adapter, "go_back"), tmp_path)
    assert run.answers.way_back == frozenset()
    run.train(0, 8)
    (good,) = run.answers.way_back
    assert 0 < good <= 6
    assert (
        CollapseAnswers(config_of(adapter, "warn"), tmp_path, run.models, None).way_back
        == frozenset()
    )
