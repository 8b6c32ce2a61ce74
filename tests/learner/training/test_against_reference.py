"""Training through DeepSpeed against the plain loop of tests/reference, and proof that the comparison can fail."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.ppo_loop import Recipe, ReferenceLoop, Row
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models import model
from prefixrl.learner.models.batch import IterationData
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import iteration
from prefixrl.learner.training.plan import shuffled_rows
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS

ITERATIONS = 10
TOLERANCE = 1e-5

VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's recipe": {},
    "k3 in the loss, ratio to the behaviour policy, mean per sequence": {
        "correction": "behaviour",
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "aggregation": "sequence",
    },
    "k2 in the loss, no correction, two epochs, discount": {
        "correction": "none",
        "kl_estimator": "k2",
        "kl_placement": "loss",
        "ppo_epochs": 2,
        "gamma": 0.97,
        "clip": 0.01,
        "value_clip": 0.01,
    },
    "no bounds": {"dual_clip": "off", "bound_ratio": "off"},
    "no reference, no entropy bonus, three minibatches": {
        "kl": 0.0,
        "entropy": 0.0,
        "minibatches": 3,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", mostly_nightly(VARIANTS.values(), 1), ids=VARIANTS.keys())
def test_ten_iterations_have_the_losses_and_weights_of_the_plain_loop(
    adapter: Path, variant: dict[str, Any]
) -> None:
    compare(run_config(adapter, algorithm=variant), ITERATIONS)


@pytest.mark.parametrize("stage", mostly_nightly([2, 1, 3], 1))
def test_every_zero_stage_has_the_losses_of_the_plain_loop(adapter: Path, stage: int) -> None:
    deepspeed = {"zero_optimization": {"stage": stage}}
    compare(run_config(adapter, learner={"deepspeed": deepspeed}), 4)


def test_the_comparison_notices_values_read_one_position_late(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = model.Critic.forward

    def late(self: model.Critic, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return straight(self, batch | {"actions": batch["actions"] + 1})

    monkeypatch.setattr(model.Critic, "forward", late)
    with pytest.raises(AssertionError, match="loss differs by"):
        compare(run_config(adapter), ITERATIONS)


def test_the_comparison_notices_a_mean_of_the_micro_batches_means(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimise, straight = iteration._optimise, iteration.ppo.policy_loss
    forwards = [0]

    def counting(models: Models, micro_batches: Any, *arguments: Any) -> Any:
        forwards[0] = len(micro_batches)
        return optimise(models, micro_batches, *arguments)

    def mean_of_means(terms: Any, settings: Any, normaliser: float) -> Any:
        return straight(terms, settings, float(terms.mask.sum()) * forwards[0])

    monkeypatch.setattr(iteration, "_optimise", counting)
    monkeypatch.setattr(iteration.ppo, "policy_loss", mean_of_means)
    with pytest.raises(AssertionError, match="policy loss differs by"):
        compare(run_config(adapter, learner={"micro_batch_tokens": 30}), ITERATIONS)


def compare(config: RunConfig, iterations: int) -> None:
    """Train both on the same batches; raise AssertionError at the first difference."""
    algorithm = config.algorithm
    total_steps = iterations * algorithm.minibatches * algorithm.ppo_epochs
    models = Models.load(config, 0, 1, config.adapter.model)
    head = dict(models.critic.full_tensors())["head.weight"][0]
    plain = ReferenceLoop(config.adapter.model, head, recipe(config, total_steps))
    for number in range(iterations):
        data = random_iteration(number)
        ours = iteration.train_iteration(models, data, config, total_steps).steps
        theirs = plain.train(rows(data), minibatches(data, config))
        assert len(ours) == len(theirs)
        for step, (mine, (policy, value)) in enumerate(zip(ours, theirs, strict=True)):
            where = f"at step {step} of iteration {number}"
            gap = abs(mine["policy_loss"] - policy)
            assert gap < TOLERANCE, f"policy loss differs by {gap} {where}"
            gap = abs(mine["value_loss"] - value)
            assert gap < TOLERANCE, f"value loss differs by {gap} {where}"
    for name, tensor in models.state_dict_for_publication().items():
        gap = (tensor - plain.actor.state_dict()[name]).abs().max().item()
        assert gap < 1e-4, f"{name} differs by {gap}"


def rows(data: IterationData) -> list[Row]:
    return [
        Row(row.prompt_tokens.tolist(), row.tokens.tolist(), row.logprobs.tolist(), row.reward)
        for _, row in sorted(data.samples.items())
    ]


def minibatches(data: IterationData, config: RunConfig) -> list[list[int]]:
    order = shuffled_rows(data.groups, data.seed)
    parts = config.algorithm.minibatches
    edges = [len(order) * part // parts for part in range(parts + 1)]
    return [list(order[a:b]) for a, b in pairwise(edges)]


def recipe(config: RunConfig, total_steps: int) -> Recipe:
    algorithm, learner = config.algorithm, config.learner
    return Recipe(
        temperature=config.rollout.temperature,
        correction=algorithm.correction,
        cap=algorithm.importance_cap,
        dual_clip=algorithm.dual_clip or math.inf,
        bound=algorithm.bound_ratio or math.inf,
        clip=algorithm.clip,
        value_clip=algorithm.value_clip,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        kl=algorithm.kl,
        kl_estimator=algorithm.kl_estimator,
        kl_in_reward=algorithm.kl_placement == "reward",
        entropy=algorithm.entropy,
        per_sequence=algorithm.aggregation == "sequence",
        epochs=algorithm.ppo_epochs,
        whiten_floor=algorithm.whiten_floor,
        actor_lr=learner.actor_lr,
        critic_lr=learner.critic_lr,
        warmup_ratio=learner.warmup_ratio,
        min_lr_ratio=learner.min_lr_ratio,
        betas=learner.adam_betas,
        grad_clip=learner.grad_clip,
        total_steps=total_steps,
    )
