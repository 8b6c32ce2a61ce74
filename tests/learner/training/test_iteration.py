"""The promises of one iteration besides its losses."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import TrainingFault
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.trained_model import TrainedModel
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.models.training import same, trained
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS


def test_the_size_of_the_micro_batches_changes_nothing(adapter: Path) -> None:
    runs = [
        trained(
            run_config(adapter, learner={"micro_batch_tokens": budget}),
            *map(random_iteration, range(3)),
        )
        for budget in (1, 40, 10_000)
    ]
    (first, weights), others = runs[0], runs[1:]
    for metrics, other_weights in others:
        for mine, theirs in zip(first, metrics, strict=True):
            assert mine.row_advantages == pytest.approx(theirs.row_advantages, abs=1e-5)
            for a, b in zip(mine.steps, theirs.steps, strict=True):
                assert a == pytest.approx(b, abs=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, atol=1e-4, rtol=0)


def test_an_iteration_is_bitwise_repeatable(adapter: Path) -> None:
    config = run_config(adapter)
    (a, a_weights), (b, b_weights) = (trained(config, random_iteration(0)) for _ in range(2))
    assert a == b
    assert same(a_weights, b_weights)


def test_the_first_step_of_a_fresh_batch_has_ratio_1_in_every_token(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"minibatches": 1})
    (metrics,), _ = trained(config, random_iteration(0))
    assert metrics.means["ratio"] == 1.0
    assert metrics.means["clip_fraction"] == metrics.means["approx_kl"] == 0.0


def test_mean_advantages_per_row_come_back_in_training_order(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"kl": 0.0, "gae_lambda": 1.0})
    data = random_iteration(0)
    (metrics,), _ = trained(config, data)
    assert len(metrics.row_advantages) == len(data.lengths)
    passed = [a for a, r in zip(metrics.row_advantages, data.rewards, strict=True) if r == 1.0]
    failed = [a for a, r in zip(metrics.row_advantages, data.rewards, strict=True) if r == 0.0]
    assert min(passed) > max(failed)
    weighted = [a * n for a, (_, n) in zip(metrics.row_advantages, data.lengths, strict=True)]
    assert abs(sum(weighted)) < 1e-3  # whitened: the mean over all tokens is 0
    assert metrics.means["reward"] == pytest.approx(sum(data.rewards) / len(data.rewards))
    assert sum(metrics.histograms["advantage"].counts) == metrics.means["tokens"]
    assert sum(metrics.histograms["age"].counts) == metrics.means["rows"]


@pytest.mark.parametrize("stage", mostly_nightly([2, 0, 1, 3], 1))
def test_a_loss_that_is_not_finite_drops_the_step_and_leaves_no_trace(
    adapter: Path, stage: int
) -> None:
    deepspeed = {"zero_optimization": {"stage": stage}}
    config = run_config(adapter, learner={"deepspeed": deepspeed}, algorithm={"minibatches": 1})
    poisoned = random_iteration(0)
    bad = replace(poisoned.samples[3], logprobs=poisoned.samples[3].logprobs * math.nan)
    poisoned = replace(poisoned, samples={**poisoned.samples, 3: bad})
    models = Models.load(config, 0, 1, config.adapter.model)
    before = models.state_dict_for_publication()
    dropped = train_iteration(models, poisoned, config, 20)
    assert dropped.means["actor_steps_dropped"] == 1.0
    assert dropped.means["critic_steps_dropped"] == 0.0
    assert dropped.steps[0]["actor_grad_norm"] == math.inf
    assert 0 < dropped.means["actor_lr"] < dropped.means["critic_lr"]
    assert all(math.isfinite(figure) for figure in dropped.means.values())
    assert models.optimizer_steps == 1
    assert same(before, models.state_dict_for_publication())
    models.critic = fresh_critic(config)
    after = train_iteration(models, random_iteration(1), config, 20)
    fresh = Models.load(config, 0, 1, config.adapter.model)
    fresh.optimizer_steps = 1
    assert after == train_iteration(fresh, random_iteration(1), config, 20)
    assert same(models.state_dict_for_publication(), fresh.state_dict_for_publication())


def fresh_critic(config: RunConfig) -> TrainedModel:
    return Models.load(config, 0, 1, config.adapter.model).critic


@pytest.mark.parametrize(("part", "what"), [("actor", "logprobs"), ("critic", "advantages")])
def test_weights_that_are_not_finite_end_the_run_with_their_iteration(
    part: str, what: str, adapter: Path
) -> None:
    config = run_config(adapter)
    models = Models.load(config, 0, 1, config.adapter.model)
    with torch.no_grad():
        next(iter(getattr(models, part).masters().values())).fill_(math.nan)
    with pytest.raises(TrainingFault, match=f"iteration 1: {what} are not finite"):
        train_iteration(models, random_iteration(1), config, 20)


def test_a_loss_that_is_no_number_in_one_micro_batch_drops_the_whole_step(adapter: Path) -> None:
    config = run_config(
        adapter, algorithm={"correction": "behaviour"}, learner={"micro_batch_tokens": 20}
    )
    data = random_iteration(0)
    row = data.samples[0]
    unlikely = replace(row, logprobs=np.full_like(row.logprobs, np.nan))
    (metrics,), _ = trained(config, replace(data, samples={**data.samples, 0: unlikely}))
    assert metrics.means["actor_steps_dropped"] == 1.0
    assert metrics.means["critic_steps_dropped"] == 0.0


@pytest.mark.parametrize("version", [0, 4])
def test_a_row_outside_the_window_is_never_trained(adapter: Path, version: int) -> None:
    config = run_config(adapter, algorithm={"max_staleness": 2})
    data = random_iteration(3)
    versions = data.samples[5].versions.copy()
    versions[-1] = version  # one token is enough
    data = replace(data, samples={**data.samples, 5: replace(data.samples[5], versions=versions)})
    with pytest.raises(
        TrainingFault, match=rf"iteration 3 was given row 5 \(group 1\) of version {version}"
    ):
        trained(config, data)


def test_a_missing_row_or_other_lengths_than_announced_are_refused(adapter: Path) -> None:
    data = random_iteration(0)
    fewer = {row: sample for row, sample in data.samples.items() if row != 2}
    with pytest.raises(ValueError, match="row 2, but its batch does not hold it"):
        trained(run_config(adapter), replace(data, samples=fewer))
    with pytest.raises(ValueError, match=r"row 0 has .* announced were 99 and 1"):
        trained(run_config(adapter), replace(data, lengths=((99, 1), *data.lengths[1:])))


def test_fewer_rows_than_minibatches_make_fewer_steps(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"minibatches": 12})
    (metrics,), _ = trained(config, random_iteration(0, groups=1, samples=3))
    assert len(metrics.steps) == 3
