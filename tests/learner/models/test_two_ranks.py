"""Two learner ranks, in processes of their own, against one.

The file is also the ranks' script: `RANK FOLDER STAGE` trains, saves and resumes, and writes a report.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from gpu.ranks import run_ranks, share_of_rank
from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.process import no_teardown
from prefixrl.learner.models import distributed, head
from prefixrl.learner.models.model import Models
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.plan import plan_iteration
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    random_iteration,
    run_config,
    save_model,
    whole,
)

pytestmark = [pytest.mark.slow, *DEEPSPEED_WARNINGS]

RANKS = 2
ITERATIONS = 10
MICRO_BATCH_TOKENS = 16
"""Few enough that ranks would often run different numbers of forwards."""
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "low rank": {"lora": {"rank": 4, "alpha": 8}},
    "low rank head": {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "lm_head"]}},
}
"""The ranks compute a group's prompt once for its rows, here every row has its own.

Their head takes the vocabulary in several blocks, here it is one."""
OF_RANKS = {"low rank": {"gradient_checkpointing": True, "packed": True}}
"""Options of the ranks alone, which change no step."""
STAGES = [2, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 1, 3))]
Reports = Callable[[int], list[dict[str, Any]]]
"""Reports of a stage, by rank."""
GROUPED = {
    "name": "rloo",
    "ppo_epochs": 2,
    "kl_limit": 1e-7,
}
"""An objective without a critic: the ranks must agree on denominators and on when to stop."""
PRM = {
    "model": "unused",
    "format": "step_tag",
    "placement": "step",
    "outcome_coefficient": 0.5,
    "coefficient": 0.5,
}
STEPS: dict[str, Any] = {
    "mode": "direct",
    "target": None,
    "scorer": {"prm": PRM},
    "algorithm": {"name": "grpo", "zscore": "buffer", "kl": 0.0},
}
PRIME: dict[str, Any] = STEPS | {
    "algorithm": {"name": "prime", "kl": 0.01, "kl_placement": "loss", "kl_estimator": "k3"},
    "implicit_reward": {"lr": 3e-3, "baseline": "code", "gamma": 0.9},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    @functools.cache
    def of_stage(stage: int) -> list[dict[str, Any]]:
        return run_stage(tmp_path_factory.mktemp("ranks"), stage)

    return of_stage


def run_stage(folder: Path, stage: int) -> list[dict[str, Any]]:
    """Run two ranks; their reports by rank."""
    save_model(folder / "adapter", is_tied=True)
    save_model(folder / "untied")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        run_ranks(__file__, RANKS, folder, stage)
    assert not (folder / "extensions").exists()  # a first start compiles nothing
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_trains(reports: Reports, stage: int, tmp_path: Path) -> None:
    config = run_config(
        save_model(tmp_path / "adapter", is_tied=True), learner={"shared_prompts": False}
    )
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(ITERATIONS):
        alone = train_iteration(models, random_iteration(iteration), config, 20).steps
        for mine, of_ranks in zip(alone, reports(stage)[0]["steps"][iteration], strict=True):
            assert of_ranks == pytest.approx(mine, abs=1e-5)


def test_the_recorded_batches_leave_some_rank_with_fewer_forwards_than_the_other() -> None:
    plans = [
        plan_iteration(data.lengths, data.groups, data.seed, 2, 2, MICRO_BATCH_TOKENS)
        for data in (random_iteration(iteration) for iteration in range(ITERATIONS))
    ]
    filled_up = [() in share for plan in plans for minibatch in plan for share in minibatch]
    assert any(filled_up) and not all(filled_up)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_trains_without_a_critic_with_masks_and_a_kl_limit(
    reports: Reports, stage: int, options: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "adapter", is_tied=options != "low rank head")
    config = run_config(
        model, algorithm=GROUPED, learner=OPTIONS[options] | {"shared_prompts": False}
    )
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(2):
        alone = train_iteration(models, random_iteration(iteration), config, 20)
        assert alone.means["steps_left_out"] == 2.0
        for mine, of_ranks in zip(alone.steps, reports(stage)[0][options][iteration], strict=True):
            assert of_ranks == pytest.approx(mine, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_a_reward_model_as_one_does(
    reports: Reports, stage: int, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "adapter", is_tied=True)
    config = run_config(model, learner={"shared_prompts": False}, **PRIME)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration, of_ranks in enumerate(reports(stage)[0]["prime"]["figures"]):
        alone = figures(models, config, iteration)
        assert {"reward_model_loss", "reward_model_accuracy", "process_advantage_ratio"} <= alone[
            0
        ].keys()
        assert iteration == 0 or alone[0]["process_largest_return"] > 0.001
        for of_one, two in zip(alone, of_ranks, strict=True):
            assert two == pytest.approx(of_one, abs=2e-5)
    assert [rank["prime"]["exported"] for rank in reports(stage)] == [26, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_reward_steps_as_one_does(reports: Reports, stage: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "adapter", is_tied=True)
    config = run_config(model, learner={"shared_prompts": False}, **STEPS)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration, of_ranks in enumerate(reports(stage)[0]["step rewards"]):
        alone = train_iteration(models, random_iteration(iteration), config, 20).row_advantages
        assert of_ranks == pytest.approx(alone, abs=1e-5)
        assert max(map(abs, alone)) > 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_see_the_same_figures(reports: Reports, stage: int) -> None:
    for name in ("steps", "went_on", "resumed", "poisoned", "probe", "grouped", "step rewards"):
        assert reports(stage)[0][name] == reports(stage)[1][name]
    assert reports(stage)[0]["prime"]["figures"] == reports(stage)[1]["prime"]["figures"]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_resume_bitwise(reports: Reports, stage: int) -> None:
    assert reports(stage)[0]["resumed"] == reports(stage)[0]["went_on"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_row_on_one_rank_drops_the_step_on_both(reports: Reports, stage: int) -> None:
    assert sorted(reports(stage)[0]["poisoned"]) == [0.0, 1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_with_sharded_weights_the_reference_is_sharded_too(reports: Reports, stage: int) -> None:
    shares = [rank["reference_share"] for rank in reports(stage)]
    if stage == 3:
        assert sum(shares) == pytest.approx(1.0) and max(shares) < 0.6
    else:
        assert shares == [1.0, 1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_only_rank_0_holds_the_published_weights(reports: Reports, stage: int) -> None:
    assert len(reports(stage)[0]["published"]) == 26
    assert reports(stage)[1]["published"] == []


# --- what a rank does -------------------------------------------------------------------------------------------------


def main(rank: int, folder: Path, stage: int) -> None:
    head.BLOCK_ENTRIES = 300  # so that the vocabulary is several blocks
    report = one_stage(rank, folder, stage)
    for name, options in OPTIONS.items():
        model = folder / ("untied" if name == "low rank head" else "adapter")
        report[name] = grouped(rank, model, stage, options | OF_RANKS.get(name, {}))
    report["prime"] = with_process_rewards(rank, folder, stage)
    report["step rewards"] = with_step_rewards(rank, folder, stage)
    (folder / f"rank_{rank}.json").write_text(json.dumps(report))
    distributed.stop()


def one_stage(rank: int, folder: Path, stage: int) -> dict[str, Any]:
    config = run_config(folder / "adapter", learner=learner(stage))
    models = Models.load(config, rank, RANKS, config.adapter.model)
    steps = [train(models, config, iteration) for iteration in range(ITERATIONS)]
    state = TrainerState(ITERATIONS, models.optimizer_steps, RANKS)
    checkpoint.save(folder / f"stage_{stage}", models, state)
    went_on = train(models, config, ITERATIONS)
    poisoned = train(models, config, ITERATIONS + 1, poisoned_row=0)
    resumed = Models.load(config, rank, RANKS, config.adapter.model)
    checkpoint.load(folder / f"stage_{stage}", resumed)
    return {
        "steps": steps,
        "went_on": went_on,
        "resumed": train(resumed, config, ITERATIONS),
        "poisoned": [step["actor_applied"] for step in poisoned],
        "probe": resumed.probe_logprobs([whole([3, 4, 5])]).tolist(),
        "reference_share": reference_share(models),
        "published": sorted(resumed.state_dict_for_publication()),
    }


def learner(stage: int) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": stage}}
    return {"deepspeed": zero, "micro_batch_tokens": MICRO_BATCH_TOKENS}


def reference_share(models: Models) -> float:
    """Return the share of the reference model that this rank holds."""
    assert models.reference is not None
    weights = list(models.reference.parameters())
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    return sum(part.numel() for part in parts) / sum(weight.numel() for weight in weights)


def grouped(
    rank: int, model: Path, stage: int, options: dict[str, Any]
) -> list[list[dict[str, float]]]:
    config = run_config(model, learner=learner(stage) | options, algorithm=GROUPED)
    models = Models.load(config, rank, RANKS, config.adapter.model)
    return [train(models, config, iteration) for iteration in range(2)]


def with_process_rewards(rank: int, folder: Path, stage: int) -> dict[str, object]:
    config = run_config(folder / "adapter", learner=learner(stage), **PRIME)
    models = Models.load(config, rank, RANKS, config.adapter.model)
    steps = [figures(models, config, iteration) for iteration in range(3)]
    reward = models.reward.trained if models.reward else None
    return {"figures": steps, "exported": len(models.state_dict_for_publication(reward))}


def with_step_rewards(rank: int, folder: Path, stage: int) -> list[list[float]]:
    config = run_config(folder / "adapter", learner=learner(stage), **STEPS)
    models = Models.load(config, rank, RANKS, config.adapter.model)
    return [list(iterated(models, config, iteration).row_advantages) for iteration in range(2)]


def figures(models: Models, config: RunConfig, iteration: int) -> list[dict[str, float]]:
    metrics = iterated(models, config, iteration)
    means = {
        name: mean
        for name, mean in metrics.means.items()
        if name.startswith(("reward_model", "process"))
    }
    return [means, *metrics.steps]


def train(
    models: Models, config: RunConfig, iteration: int, poisoned_row: int | None = None
) -> list[dict[str, float]]:
    return list(iterated(models, config, iteration, poisoned_row).steps)


def iterated(
    models: Models, config: RunConfig, iteration: int, poisoned_row: int | None = None
) -> IterationMetrics:
    data = random_iteration(iteration)
    if poisoned_row is not None:
        sample = data.samples[poisoned_row]
        poison = {poisoned_row: replace(sample, logprobs=sample.logprobs * math.nan)}
        data = replace(data, samples=data.samples | poison)
    return train_iteration(models, share_of_rank(models, data, config), config, 20)


if __name__ == "__main__":
    with no_teardown():
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
