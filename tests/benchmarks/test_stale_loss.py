"""The learner's loss and gradient on a batch that is really stale, against the formulas written out row by row."""

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.aged_run import AgedRun, Target
from benchmarks.staleness_arms import Arm, Size, config_of
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.models.batch import IterationData, Sample
from prefixrl.learner.training.plan import plan_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS
from support.tiers import mostly_nightly

pytestmark = DEEPSPEED_WARNINGS

AGE = 4
FORMS = ("decoupled", "none", "behaviour", "none, bounded")
SIZE = Size((AGE,), (1,), iterations=12, groups=4, problems=8, evaluate_every=5)


@pytest.mark.parametrize("form", mostly_nightly(FORMS, 1))
def test_the_first_step_on_a_stale_batch_has_the_loss_and_gradient_of_the_formulas(
    form: str,
) -> None:
    config = config_of(Arm(AGE, form, 1, 1e-3), SIZE)
    run = AgedRun(config, Target(config))
    for _ in range(SIZE.iterations - 1):
        run.fill()
        run.train()
    model, initial = (
        AutoModelForCausalLM.from_pretrained(config.adapter.model, dtype=torch.float32)
        for _ in range(2)
    )
    weights = run.models.state_dict_for_publication()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    trained = run.train()
    assert set(trained.ages) == {AGE}
    assert trained.metrics.means["behaviour_gap"] > 0.05, "the batch must be stale for real"
    loss = first_loss(model, initial, trained.data, config)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert trained.metrics.steps[0]["policy_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert trained.metrics.steps[0]["actor_grad_norm"] == pytest.approx(norm, rel=1e-4)
    # At the first step theta = p: without staleness all three would be alike.
    for other in {"none", "behaviour", "decoupled"} - {config.algorithm.correction}:
        algorithm = config.algorithm.model_copy(update={"correction": other})
        changed = config.model_copy(update={"algorithm": algorithm})
        assert abs(first_loss(model, initial, trained.data, changed).item() - loss.item()) > 5e-5


def first_loss(
    model: PreTrainedModel, initial: PreTrainedModel, data: IterationData, config: RunConfig
) -> Tensor:
    """Mean over the first minibatch's tokens of -w min(rho A, clip(rho) A) - c_H H, at theta = p."""
    algorithm = config.algorithm
    budget = config.learner.micro_batch_tokens
    minibatches = plan_iteration(
        data.lengths, data.groups, data.seed, 1, algorithm.minibatches, budget
    )
    rows = [
        data.samples[row]
        for micro_batch in minibatches[0][0]
        for line in micro_batch
        for row in line
    ]
    total = torch.zeros(())
    for row in rows:
        now, entropy = logprobs(model, row)
        p, k = now.detach(), (now - logprobs(initial, row)[0]).detach()
        whole, moved = group_advantage(row, data), float(p.sum()) - float(row.logprobs.sum())
        for t in range(row.tokens.size):
            mu, advantage = row.logprobs[t], whole - algorithm.kl * float(k[t:].sum())
            w = 1.0
            if algorithm.correction == "decoupled":
                w = min(math.exp(float(p[t]) - mu), algorithm.importance_cap)
            old = torch.tensor(row.logprobs.tolist()) if algorithm.correction == "behaviour" else p
            is_whole = algorithm.ratio == "prefix"
            rho = torch.exp((now - old).sum() if is_whole else now[t] - old[t])
            clipped = rho.clamp(1 - algorithm.clip, 1 + algorithm.clip)
            surrogate = torch.min(rho * advantage, clipped * advantage)
            if advantage < 0:
                surrogate = surrogate.clamp(min=(algorithm.dual_clip or math.inf) * advantage)
            if math.copysign(1, advantage) * moved > math.log(algorithm.bound_ratio or math.inf):
                surrogate = (
                    surrogate.detach()
                )  # the row's theta/mu is past the bound the way it is pushed
            surrogate = surrogate / (row.tokens.size if is_whole else 1)
            total = total - w * (surrogate + algorithm.entropy * entropy[t])
    return total / sum(row.tokens.size for row in rows)


def logprobs(model: PreTrainedModel, row: Sample) -> tuple[Tensor, Tensor]:
    ids = [*row.prompt_tokens.tolist(), *row.tokens.tolist()]
    table = torch.log_softmax(
        model(torch.tensor([ids])).logits[0, len(row.prompt_tokens) - 1 : -1], -1
    )
    picked = [table[t, token] for t, token in enumerate(row.tokens.tolist())]
    return torch.stack(picked), -(table.exp() * table).sum(-1)


def group_advantage(row: Sample, data: IterationData) -> float:
    rewards = [other.reward for other in data.samples.values() if other.group == row.group]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1))
    return 0.0 if min(rewards) == max(rewards) else (row.reward - mean) / (deviation + 1e-6)
