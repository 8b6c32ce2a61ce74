"""An iteration with an implicit reward model against plain loops: scores, advantages, the model's own steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError, TrainingFault
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.iteration import train_iteration
from support.models import tiny_model
from support.models.training import same

pytestmark = tiny_model.DEEPSPEED_WARNINGS

BETA, FLOOR = 0.05, 1e-6
Rows = list[list[float]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.with_tokenizer(
        tiny_model.save_model(tmp_path_factory.mktemp("models") / "adapter")
    )


@pytest.fixture(scope="module")
def scorer(adapter: Path) -> Path:
    """A model that differs from the adapter, so that scores are not 0 at the beginning."""
    model = plain(adapter)
    torch.manual_seed(11)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    folder = adapter.parent / "scorer"
    model.save_pretrained(folder)
    return tiny_model.with_tokenizer(folder)


def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def config_of(adapter: Path, implicit: dict[str, Any], **algorithm: Any) -> RunConfig:
    return tiny_model.run_config(
        adapter,
        algorithm={"name": "rloo", "kl": 0.0, "minibatches": 1, "whiten": False} | algorithm,
        implicit_reward=implicit,
    )


def logprobs(model: PreTrainedModel, data: IterationData) -> list[Tensor]:
    """One forward per row, at temperature 1."""
    results = []
    for row in range(len(data.lengths)):
        sample = data.samples[row]
        ids = torch.tensor([[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]])
        logits = model(input_ids=ids).logits[0, len(sample.prompt_tokens) - 1 : -1]
        results.append(
            logits.log_softmax(-1).gather(1, ids[0, len(sample.prompt_tokens) :, None])[:, 0]
        )
    return results


def scores(model: PreTrainedModel, reference: PreTrainedModel, data: IterationData) -> list[Tensor]:
    with torch.no_grad():
        theirs = logprobs(reference, data)
    return [
        BETA * (mine - other) for mine, other in zip(logprobs(model, data), theirs, strict=True)
    ]


def advantages(rewards: Rows, data: IterationData, normalise: bool = True) -> list[float]:
    """Mean advantage of each row: leave-one-out of both sources, no discount."""
    largest = max(abs(sum(row[t:])) for row in rewards for t in range(len(row)))
    rewards = [[each / (largest + FLOOR if normalise else 1.0) for each in row] for row in rewards]
    mus = [sum(row) / len(row) for row in rewards]
    means = []
    for index, row in enumerate(rewards):
        others = [
            j for j, group in enumerate(data.groups) if group == data.groups[index] and j != index
        ]
        outcome = data.rewards[index] - sum(data.rewards[j] for j in others) / len(others)
        offset = sum(mus[j] for j in others) / len(others)
        tokens = [sum(each - offset for each in row[t:]) + outcome for t in range(len(row))]
        means.append(sum(tokens) / len(tokens))
    return means


def learned(
    model: PreTrainedModel, reference: PreTrainedModel, data: IterationData, lr: float
) -> float:
    """One step of AdamW on the outcomes; the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    logits = torch.stack([each.sum() for each in scores(model, reference, data)])
    outcomes = torch.tensor(data.rewards)
    sigma = logits.sigmoid()
    loss = -(outcomes * sigma.log() + (1 - outcomes) * (1 - sigma).log()).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    return loss.item()


def as_rows(found: list[Tensor]) -> Rows:
    return [each.tolist() for each in found]


@pytest.mark.parametrize("update", ["after", "before", "none"])
def test_advantages_and_the_reward_models_step_are_those_of_plain_loops(
    adapter: Path, scorer: Path, update: str
) -> None:
    implicit = {"model": str(scorer), "reference_model": str(adapter), "update": update, "lr": 1e-3}
    config, data = config_of(adapter, implicit), tiny_model.random_iteration(1)
    models = Models.load(config, 0, 1, str(adapter))
    metrics = train_iteration(models, data, config, 20)
    model, reference = plain(scorer), plain(adapter)
    with torch.no_grad():
        before = as_rows(scores(model, reference, data))
    loss = learned(model, reference, data, 1e-3)
    with torch.no_grad():
        after = as_rows(scores(model, reference, data))
    expected = advantages(after if update == "before" else before, data)
    assert metrics.row_advantages == pytest.approx(expected, abs=2e-5)
    if update == "none":
        assert "reward_model_loss" not in metrics.means
        return
    assert metrics.means["reward_model_loss"] == pytest.approx(loss, abs=1e-6)
    assert models.reward is not None and models.reward.trained is not None
    actual = models.state_dict_for_publication(models.reward.trained)
    for name, weights in model.state_dict().items():
        assert torch.allclose(actual[name], weights, atol=2e-6), name


def test_with_the_policy_as_reference_its_logprobs_are_those_at_temperature_1(
    adapter: Path, scorer: Path
) -> None:
    config = config_of(adapter, {"model": str(scorer), "reference": "policy"})
    assert config.rollout.temperature == 0.7
    data = tiny_model.random_iteration(2)
    metrics = train_iteration(Models.load(config, 0, 1, str(adapter)), data, config, 20)
    with torch.no_grad():
        actual = as_rows(scores(plain(scorer), plain(adapter), data))
    assert metrics.row_advantages == pytest.approx(advantages(actual, data), abs=2e-5)


def test_the_sum_at_the_last_token_and_no_normalisation(adapter: Path, scorer: Path) -> None:
    implicit = {
        "model": str(scorer),
        "reference_model": str(adapter),
        "granularity": "whole",
        "norm": "none",
    }
    config, data = config_of(adapter, implicit), tiny_model.random_iteration(3)
    metrics = train_iteration(Models.load(config, 0, 1, str(adapter)), data, config, 20)
    with torch.no_grad():
        sums = [float(each.sum()) for each in scores(plain(scorer), plain(adapter), data)]
    expected = []
    for index, total in enumerate(sums):
        others = [
            j for j, group in enumerate(data.groups) if group == data.groups[index] and j != index
        ]
        both = (total, data.rewards[index]), [(sums[j], data.rewards[j]) for j in others]
        expected.append(sum(both[0]) - sum(map(sum, both[1])) / len(others))
    assert metrics.row_advantages == pytest.approx(expected, abs=2e-5)


def test_with_a_critic_process_rewards_are_rewards_of_tokens(adapter: Path, scorer: Path) -> None:
    implicit = {
        "model": str(scorer),
        "reference_model": str(adapter),
        "coefficient": 2.0,
        "outcome_coefficient": 3.0,
    }
    config = config_of(adapter, implicit, name="gae", gae_lambda=1.0)
    data = tiny_model.random_iteration(4)
    models = Models.load(config, 0, 1, str(adapter))
    metrics = train_iteration(models, data, config, 20)
    with torch.no_grad():
        rewards = as_rows(scores(plain(scorer), plain(adapter), data))
    largest = max(abs(sum(row[t:])) for row in rewards for t in range(len(row)))
    # With lambda = 1 the returns that the critic learns are the sums of all rewards still to come.
    total = count = 0.0
    for row, outcome in zip(rewards, data.rewards, strict=True):
        for t in range(len(row)):
            total += 3.0 * outcome + 2.0 * sum(row[t:]) / (largest + FLOOR)
            count += 1
    assert metrics.means["return"] == pytest.approx(total / count, abs=1e-4)


def test_at_the_beginning_every_score_is_0_and_the_model_learns_to_rank(adapter: Path) -> None:
    config = config_of(adapter, {"lr": 3e-3}, minibatches=2)
    models, data = Models.load(config, 0, 1, str(adapter)), tiny_model.random_iteration(5)
    first = train_iteration(models, data, config, 20).means
    assert first["process_largest_return"] == 0.0
    assert first["reward_model_loss"] == pytest.approx(0.6931, abs=0.02)
    for _ in range(15):
        last = train_iteration(models, data, config, 20).means
    assert last["reward_model_accuracy"] > 0.95 > first["reward_model_accuracy"]
    assert last["reward_model_loss"] < 0.5 and last["process_advantage_ratio"] > 0.0


@pytest.mark.parametrize("low_rank", [False, True], ids=["full", "low rank"])
def test_a_resumed_run_goes_on_bitwise_and_the_model_is_exported(
    adapter: Path, tmp_path: Path, low_rank: bool
) -> None:
    config = config_of(adapter, {"lr": 1e-3}, minibatches=2)
    learner = {"ema_decay": 0.5} | ({"lora": {"rank": 4, "alpha": 8}} if low_rank else {})
    config = config.model_copy(
        update={
            "learner": type(config.learner).model_validate(config.learner.model_dump() | learner)
        }
    )
    models = Models.load(config, 0, 1, str(adapter))
    train_iteration(models, tiny_model.random_iteration(0), config, 20)
    folder = checkpoint.save(tmp_path, models, TrainerState(1, models.optimizer_steps, 1))
    assert sorted(path.name for path in folder.glob("hf*")) == [
        "hf",
        "hf_ema",
        "hf_reward",
        "hf_reward_ema",
    ]
    resumed = Models.load(config, 0, 1, str(adapter))
    checkpoint.load(tmp_path, resumed)
    for loaded_models in (models, resumed):
        assert (
            train_iteration(loaded_models, tiny_model.random_iteration(1), config, 20).means[
                "process_largest_return"
            ]
            > 0
        )
    assert models.reward is not None and resumed.reward is not None
    theirs = models.state_dict_for_publication(models.reward.trained)
    assert same(theirs, resumed.state_dict_for_publication(resumed.reward.trained))
    assert same(models.state_dict_for_publication(), resumed.state_dict_for_publication())
    assert not same(theirs, plain(folder / "hf_reward").state_dict())
    without = config.model_copy(update={"implicit_reward": None})
    with pytest.raises(DataError, match="a trained implicit reward model = one, this run has none"):
        checkpoint.load(tmp_path, Models.load(without, 0, 1, str(adapter)))


def test_a_reward_model_with_another_tokenizer_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = tiny_model.with_tokenizer(
        tiny_model.save_model(tmp_path / "other"), tiny_model.VOCABULARY - 1
    )
    config = config_of(adapter, {"model": str(other)})
    with pytest.raises(
        DataError, match=r"implicit_reward.model = .*other' has another tokenizer than the adapter"
    ):
        Models.load(config, 0, 1, str(adapter))


def test_an_outcome_outside_0_and_1_is_refused(adapter: Path) -> None:
    config, data = config_of(adapter, {}), tiny_model.random_iteration(1)
    changed = IterationData(**{**vars(data), "rewards": (2.0, *data.rewards[1:])})
    with pytest.raises(
        TrainingFault, match=r"row 0 has reward 2.0; the implicit reward model learns outcomes"
    ):
        train_iteration(Models.load(config, 0, 1, str(adapter)), changed, config, 20)
