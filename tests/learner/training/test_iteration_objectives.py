"""One iteration under every objective: masks, warm-up, limits, and batches that teach nothing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixrl.common.errors import DataError, TrainingFault
from prefixrl.learner.models.batch import IterationData, pad
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.models.training import same, trained
from support.paths import ROOT
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS

GROUPED = ["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
LOSSES = ROOT / "deploy/examples/losses"
STILL = {"kl": 0.0, "entropy": 0.0}
"""Nothing but the advantages moves the policy."""


def with_rewards(data: IterationData, rewards: list[float]) -> IterationData:
    samples = {row: replace(each, reward=rewards[row]) for row, each in data.samples.items()}
    return replace(data, rewards=tuple(rewards), samples=samples)


@pytest.mark.parametrize(
    "algorithm",
    mostly_nightly(
        [
            {"name": "appo", "ratio": "prefix_mean", "correction": "behaviour"},
            {"name": "grpo", "kl_placement": "loss", "kl_estimator": "k3", "clip_high": 0.3},
            {"name": "rloo", "loss_function": f"{LOSSES}/bands.py:loss"},
            {"name": "gae", "loss_function": f"{LOSSES}/dppo.py:loss"},
            {"name": "rloo", "loss_function": f"{LOSSES}/vespo.py:loss"},
            {"name": "tppo"},
            {"name": "appo", "clip": 0.5},
            {"name": "grpo", "zscore": "buffer", "aggregation": "sequence"},
            {"name": "dr_grpo", "dual_clip": 3.0},
            {"name": "grpo", "loss_function": f"{LOSSES}/topr.py:loss"},
            {"name": "grpo", "loss_function": f"{LOSSES}/a3po.py:loss", "kl": 0.0},
            {"name": "reinforce_baseline", "ratio": "prefix_mean", "ppo_epochs": 2},
        ],
        2,
    ),
    ids=lambda algorithm: " ".join(map(str, algorithm.values())),
)
def test_no_objective_depends_on_the_size_of_the_micro_batches(
    adapter: Path, algorithm: dict[str, Any]
) -> None:
    runs = [
        trained(
            run_config(adapter, algorithm=algorithm, learner={"micro_batch_tokens": budget}),
            *map(random_iteration, range(2)),
        )
        for budget in (1, 10_000)
    ]
    (one_by_one, weights), (together, other_weights) = runs
    for mine, theirs in zip(one_by_one, together, strict=True):
        assert mine.row_advantages == pytest.approx(theirs.row_advantages, abs=1e-5)
        assert work(mine) > work(theirs)  # smaller micro-batches repeat prompts
        assert taught(mine) == pytest.approx(taught(theirs), abs=1e-4)
        for a, b in zip(mine.steps, theirs.steps, strict=True):
            assert a == pytest.approx(b, abs=1e-5, rel=2e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(other_weights[name], tensor, atol=1e-4, rtol=0)


def work(metrics: IterationMetrics) -> float:
    return metrics.means["forward_tokens"]


def taught(metrics: IterationMetrics) -> dict[str, float]:
    return {
        name: figure
        for name, figure in metrics.means.items()
        if name not in ("forward_tokens", "padded_tokens")
    }


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_objective_loads_and_reports_no_critic(adapter: Path, name: str) -> None:
    config = run_config(adapter, algorithm={"name": name})
    assert Models.load(config, 0, 1, config.adapter.model).critic is None
    (metrics,), _ = trained(config, random_iteration(0))
    assert "policy_loss" in metrics.means
    assert not any("value" in key or "critic" in key for key in metrics.means)
    assert not any("value" in key or "critic" in key for key in metrics.steps[0])


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_one_have_advantage_0_and_are_counted(adapter: Path, name: str) -> None:
    config = run_config(adapter, algorithm={"name": name} | STILL)
    models = Models.load(config, 0, 1, config.adapter.model)
    before = models.state_dict_for_publication()
    metrics = train_iteration(models, random_iteration(0, groups=6, samples=1), config, 20)
    assert metrics.row_advantages == (0.0,) * 6
    assert metrics.means["groups_of_one_fraction"] == 1.0
    assert metrics.means["zero_advantage_rows_fraction"] == 1.0
    assert metrics.means["policy_loss"] == metrics.means["actor_grad_norm"] == 0.0
    assert same(before, models.state_dict_for_publication())


@pytest.mark.parametrize("name", [*GROUPED, "gae", "appo"])
@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_a_batch_of_equal_rewards_is_trained_without_harm(
    adapter: Path, name: str, reward: float
) -> None:
    config = run_config(adapter, algorithm={"name": name})
    data = with_rewards(random_iteration(0), [reward] * 12)
    (metrics,), weights = trained(config, data)
    assert metrics.means["uniform_groups_fraction"] == 1.0
    assert metrics.means["all_right_groups_fraction"] == float(reward == 1.0)
    assert metrics.means["all_wrong_groups_fraction"] == float(reward == 0.0)
    assert metrics.means["actor_steps_dropped"] == 0.0
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize("name", [*GROUPED, "gae", "appo"])
def test_fractional_rewards_are_used_as_they_are(adapter: Path, name: str) -> None:
    rewards = [0.0, 0.25, 0.5] * 4
    config = run_config(adapter, algorithm={"name": name} | STILL)
    (metrics,), _ = trained(config, with_rewards(random_iteration(0), rewards))
    assert metrics.means["reward"] == 0.25
    worst, middle, best = (metrics.row_advantages[i::3] for i in range(3))
    if name in GROUPED:
        assert max(worst) < min(middle) and max(middle) < min(best)
    else:
        assert sum(worst) < sum(middle) < sum(best)


@pytest.mark.parametrize("name", [*GROUPED, "gae", "appo"])
def test_a_prefix_of_a_single_eos_is_an_action_like_any_other(adapter: Path, name: str) -> None:
    eos = np.ones(1, dtype=np.int32)
    data = random_iteration(0)
    rows = {
        row: replace(
            each,
            tokens=eos,
            logprobs=np.full(1, -4.0, dtype=np.float32),
            versions=each.versions[:1],
        )
        for row, each in data.samples.items()
        if row % 3 == 0
    }
    lengths = tuple((p, 1 if row % 3 == 0 else n) for row, (p, n) in enumerate(data.lengths))
    data = replace(data, samples={**data.samples, **rows}, lengths=lengths)
    config = run_config(adapter, algorithm={"name": name})
    (metrics,), weights = trained(config, with_rewards(data, [1.0, 0.0, 0.0] * 4))
    assert metrics.means["actor_steps_dropped"] == 0.0
    assert metrics.means["tokens"] == sum(n for _, n in lengths)
    models = Models.load(config, 0, 1, config.adapter.model)
    assert not same(weights, models.state_dict_for_publication())


@pytest.mark.parametrize("name", ["rloo", "appo"])
def test_a_reward_that_is_no_number_ends_the_run(adapter: Path, name: str) -> None:
    data = with_rewards(random_iteration(1), [math.nan] + [0.0] * 11)
    with pytest.raises(
        TrainingFault, match=r"iteration 1 was given row 0 \(group 0\) with reward nan"
    ):
        trained(run_config(adapter, algorithm={"name": name}), data)


@pytest.mark.parametrize("name", ["rloo", "appo"])
def test_a_loss_that_is_not_finite_drops_the_step_of_any_objective(
    adapter: Path, name: str
) -> None:
    config = run_config(adapter, algorithm={"name": name, "minibatches": 1})
    data = random_iteration(0)
    bad = replace(data.samples[3], logprobs=data.samples[3].logprobs * math.nan)
    models = Models.load(config, 0, 1, config.adapter.model)
    before = models.state_dict_for_publication()
    data = replace(data, samples={**data.samples, 3: bad})
    metrics = train_iteration(models, data, config, 20)
    assert metrics.means["actor_steps_dropped"] == 1.0
    assert same(before, models.state_dict_for_publication())


def on_policy(models: Models, data: IterationData) -> IterationData:
    """The same rows as if the present policy had written them."""
    with torch.no_grad():
        rows = {
            row: replace(each, logprobs=models.forward_actor(pad([each], 0))[0][0].numpy())
            for row, each in data.samples.items()
        }
    return replace(data, samples=rows)


def shifted(data: IterationData, row: int, by: float) -> IterationData:
    """One row whose first token the engine thought exp(by) times as likely."""
    logprobs = data.samples[row].logprobs.copy()
    logprobs[0] += by
    changed = replace(data.samples[row], logprobs=logprobs)
    return replace(data, samples={**data.samples, row: changed})


def test_what_a_loss_function_leaves_out_is_counted_and_has_no_say(adapter: Path) -> None:
    config = run_config(
        adapter,
        algorithm={"name": "rloo", "minibatches": 1, "loss_function": f"{LOSSES}/bands.py:loss"}
        | {"kl_placement": "loss", "kl_estimator": "k3"},
    )
    data = with_rewards(random_iteration(0), [1.0, 0.0, 0.0] * 4)
    data = on_policy(Models.load(config, 0, 1, config.adapter.model), data)
    (untouched,), unmasked_weights = trained(config, data)
    (metrics,), weights = trained(config, shifted(data, 4, 2.0))
    (nearby,), same_weights = trained(config, shifted(data, 4, 2.2))
    (again,), other_weights = trained(config, shifted(data, 4, 7.0))
    tokens = metrics.means["tokens"]
    assert untouched.means["loss/masked"] == 0.0
    assert metrics.means["loss/masked"] == pytest.approx(1 / tokens)
    assert sum(metrics.histograms["log_importance"].counts) == tokens
    assert again.means["loss/masked"] == pytest.approx(data.lengths[4][1] / tokens)
    assert nearby.means["policy_loss"] == metrics.means["policy_loss"]
    assert same(weights, same_weights)
    assert not same(weights, unmasked_weights) and not same(weights, other_weights)


def test_the_critic_warms_up_while_the_actor_stands_still(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"critic_warmup_steps": 3})
    models = Models.load(config, 0, 1, config.adapter.model)
    initial = models.state_dict_for_publication()
    assert models.critic is not None
    head = dict(models.critic.full_tensors())["head.weight"].clone()
    first = train_iteration(models, random_iteration(0), config, 20)
    assert first.means["actor_steps_frozen"] == 2.0 and "policy_loss" not in first.means
    assert "value_loss" in first.means and "entropy" in first.means
    assert same(initial, models.state_dict_for_publication())
    assert not torch.equal(head, dict(models.critic.full_tensors())["head.weight"])
    second = train_iteration(models, random_iteration(1), config, 20)
    assert second.means["actor_steps_frozen"] == 1.0
    assert "actor_applied" not in second.steps[0] and second.steps[1]["actor_applied"] == 1.0
    assert not same(initial, models.state_dict_for_publication())


def test_the_actors_learning_rate_warms_up_once_it_learns_also_after_a_resume(
    adapter: Path, tmp_path: Path
) -> None:
    learner = {"warmup_ratio": 0.5, "actor_lr": 1e-3}
    config = run_config(adapter, algorithm={"critic_warmup_steps": 4}, learner=learner)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(2):
        train_iteration(models, random_iteration(iteration), config, 20)
    checkpoint.save(tmp_path, models, TrainerState(2, models.optimizer_steps, 1))
    resumed = Models.load(config, 0, 1, config.adapter.model)
    checkpoint.load(tmp_path, resumed)
    for loaded_models in (models, resumed):
        train_iteration(loaded_models, random_iteration(2), config, 20)
        # The second of 16 steps, of which half warm up.
        assert loaded_models.actor.adam.param_groups[0]["lr"] == pytest.approx(1e-3 * 2 / 8)


def test_a_small_batch_takes_a_proportionate_number_of_steps(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"groups_per_iteration": 8, "minibatches": 4})
    models = Models.load(config, 0, 1, config.adapter.model)
    assert len(train_iteration(models, random_iteration(0, groups=8), config, 20).steps) == 4
    assert len(train_iteration(models, random_iteration(1, groups=4), config, 20).steps) == 2
    assert len(train_iteration(models, random_iteration(2, groups=1), config, 20).steps) == 1


@pytest.mark.parametrize("name", ["rloo", "gae"])
def test_past_the_kl_limit_the_remaining_steps_are_left_out(adapter: Path, name: str) -> None:
    algorithm = {"name": name, "minibatches": 2, "ppo_epochs": 3}
    free = run_config(adapter, algorithm=algorithm, learner={"actor_lr": 2e-2})
    limited = run_config(
        adapter, algorithm=algorithm | {"kl_limit": 1e-4}, learner={"actor_lr": 2e-2}
    )
    models = Models.load(limited, 0, 1, limited.adapter.model)
    metrics = train_iteration(models, random_iteration(0), limited, 60)
    (whole,), _ = trained(free, random_iteration(0))
    # The first step starts at p itself; the second one sees what the first did.
    assert len(metrics.steps) == 2 and metrics.means["steps_left_out"] == 4.0
    assert len(whole.steps) == 6 and whole.means["steps_left_out"] == 0.0
    assert models.optimizer_steps == 6


def test_a_checkpoint_of_an_objective_without_a_critic_resumes_bitwise(
    adapter: Path, tmp_path: Path
) -> None:
    config = run_config(adapter, algorithm={"name": "rloo"})
    models = Models.load(config, 0, 1, config.adapter.model)
    train_iteration(models, random_iteration(0), config, 20)
    state = TrainerState(1, models.optimizer_steps, 1)
    checkpoint.save(tmp_path, models, state)
    expected = train_iteration(models, random_iteration(1), config, 20)
    resumed = Models.load(config, 0, 1, config.adapter.model)
    checkpoint.load(tmp_path, resumed)
    assert train_iteration(resumed, random_iteration(1), config, 20) == expected
    with pytest.raises(DataError, match="written with critic = none, this run has one"):
        checkpoint.load(tmp_path, Models.load(run_config(adapter), 0, 1, config.adapter.model))


@pytest.mark.parametrize(
    ("iteration", "bound", "is_known"), [(0, 1.6, True), (0, None, False), (3, 1.6, False)]
)
def test_what_noise_alone_bounds_is_what_the_first_step_bounds_of_rows_of_age_0(
    adapter: Path, iteration: int, bound: float | None, is_known: bool
) -> None:
    algorithm = {
        "name": "grpo",
        "minibatches": 1,
        "bound_ratio": bound,
        "kl": 0.0,
        "max_staleness": 4,
    }
    data = random_iteration(0)
    (metrics,), _ = trained(
        run_config(adapter, algorithm=algorithm), replace(data, iteration=iteration)
    )
    assert ("bounded_by_noise_fraction" in metrics.means) == is_known
    if is_known:
        assert metrics.means["bounded_by_noise_fraction"] == metrics.means["bounded_fraction"] > 0.1
