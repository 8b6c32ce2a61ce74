"""The epochs of a warm start: the loss is cross entropy, an interrupted one goes on bitwise, the best epoch is left."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prefixrl.common.config.run import RunConfig
from prefixrl.common.prompts.rendering import masked_tokens
from prefixrl.common.run.warm_start import EpochLine
from prefixrl.learner.commands.warm_start import trainable
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.warm_start import fitting
from prefixrl.learner.training.warm_start.examples import Example
from prefixrl.learner.training.warm_start.fitting import Fit, Fitting, best_epoch, token_losses
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model, with_tokenizer

pytestmark = DEEPSPEED_WARNINGS

LR = 3e-3


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("adapter"), is_tied=True)
    with_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def config(adapter: Path) -> RunConfig:
    return trainable(run_config(adapter), LR)


def examples(count: int, seed: int) -> list[Example]:
    """Prompts of random lengths; the prefix is the prompt's first token, counted on."""
    draws = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = draws.integers(1, 20, draws.integers(2, 9)).astype(np.int32)
        prefix = (prompt[0] + np.arange(1, 4)).astype(np.int32)
        rows.append(Example(f"{seed}-{number}", prompt, prefix))
    return rows


TRAINING, HELD_OUT = examples(48, 1), examples(16, 2)


def fit(epochs: int, patience: int = 99) -> Fit:
    return Fit(epochs, batch_rows=8, patience=patience, micro_batch_tokens=40, seed=5)


def loaded(config: RunConfig) -> Models:
    return Models.load(config, 0, 1, config.adapter.model)


def run(config: RunConfig, directory: Path, numbers: Fit) -> list[EpochLine]:
    directory.mkdir(exist_ok=True)
    return Fitting(loaded(config), directory, TRAINING, HELD_OUT, numbers).run()


def plain_loss(folder: Path, rows: Sequence[Example], config: RunConfig) -> float:
    """The slow way: one row at a time, by transformers' own model, which never draws masked tokens."""
    never = list(masked_tokens(config, config.adapter.model))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for row in rows:
        whole = torch.tensor(np.concatenate([row.prompt, row.prefix]), dtype=torch.long)[None]
        logits = model(whole).logits[0] / config.rollout.temperature
        logits[:, never] = -torch.inf
        logprobs = logits.log_softmax(-1)
        for place in range(row.prompt.size, whole.shape[1]):
            total -= logprobs[place - 1, whole[0, place]].item()
    return total


def test_the_loss_is_the_cross_entropy_of_the_prefixes_alone(
    config: RunConfig, adapter: Path
) -> None:
    models = loaded(config)
    with torch.no_grad():
        losses = token_losses(models, HELD_OUT)
    assert losses.shape == (16, 3)
    assert losses.sum().item() == pytest.approx(plain_loss(adapter, HELD_OUT, config), rel=1e-5)


def test_a_pattern_is_learned_and_holds_for_other_problems(
    config: RunConfig, tmp_path: Path
) -> None:
    lines = run(config, tmp_path / "warm", fit(epochs=6))
    assert [line.epoch for line in lines] == list(range(7))
    assert lines[-1].held_out_loss < 0.7 * lines[0].held_out_loss
    best = best_epoch(lines)
    (folder,) = (tmp_path / "warm/checkpoints").iterdir()
    assert folder.name == f"step_{best:08d}"
    assert checkpoint.damage(folder) == ""
    tokens = sum(example.prefix.size for example in HELD_OUT)
    exported = plain_loss(folder / "hf", HELD_OUT, config) / tokens
    assert exported == pytest.approx(lines[best].held_out_loss, rel=1e-4)


def test_an_interrupted_warm_start_goes_on_bitwise(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(config, tmp_path / "whole", fit(epochs=4))
    save = checkpoint.save
    saved: list[int] = []

    def save_and_die(directory: Path, models: Models, state: checkpoint.TrainerState) -> Path:
        saved.append(state.iteration)
        if state.iteration == 3:
            raise KeyboardInterrupt
        return save(directory, models, state)

    monkeypatch.setattr(fitting.checkpoint, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut", fit(epochs=4))
    monkeypatch.setattr(fitting.checkpoint, "save", save)
    resumed = run(config, tmp_path / "cut", fit(epochs=4))
    assert saved == [1, 2, 3]
    figures = [[(line.loss, line.held_out_loss) for line in lines] for lines in (whole, resumed)]
    assert figures[0] == figures[1]
    weights = [
        load_file(next((tmp_path / name).glob("checkpoints/*/hf/model.safetensors")))
        for name in ("whole", "cut")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_it_ends_where_no_epoch_is_better_any_more(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([4.0, 3.0, 3.5, 3.2, 1.0])
    monkeypatch.setattr(
        Fitting, "held_out_losses", lambda self: (np.array([next(losses)]), np.ones(1))
    )
    lines = run(config, tmp_path / "warm", fit(epochs=9, patience=2))
    assert [line.held_out_loss for line in lines] == [4.0, 3.0, 3.5, 3.2]
    assert [path.name for path in (tmp_path / "warm/checkpoints").iterdir()] == ["step_00000001"]


def test_a_rate_that_breaks_the_weights_is_named(config: RunConfig, tmp_path: Path) -> None:
    rate = config.learner.model_copy(update={"actor_lr": 1e20, "warmup_ratio": 0.0})
    with pytest.raises(fitting.TrainingFault, match="lower --lr"):
        run(config.model_copy(update={"learner": rate}), tmp_path / "warm", fit(epochs=3))
