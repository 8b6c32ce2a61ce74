"""Two learner ranks, in processes of their own, against one."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixrl.learner.models.model import Models
from prefixrl.learner.training.iteration import train_iteration
from prefixrl.learner.training.plan import plan_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config, save_model
from support.runs.rank_process import MICRO_BATCH_TOKENS, PRIME, STEPS, figures, run_ranks

pytestmark = [pytest.mark.slow, *DEEPSPEED_WARNINGS]

OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "low rank": {"lora": {"rank": 4, "alpha": 8}},
    "low rank head": {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "lm_head"]}},
}
"""The ranks compute a group's prompt once for its rows, here every row has its own.

With "low rank" the ranks also pack rows and checkpoint gradients: that changes no step either.

Their head takes the vocabulary in several blocks, here it is one."""
ITERATIONS = 10
STAGES = [2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0, 1, 3))]
Told = Callable[[int], list[dict[str, Any]]]
"""Reports of a stage, by rank."""
GROUPED = {
    "name": "rloo",
    "ppo_epochs": 2,
    "kl_limit": 1e-7,
}
"""An objective without a critic: the ranks must agree on denominators and on when to stop."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    @functools.cache
    def told_of(stage: int) -> list[dict[str, Any]]:
        return [rank[str(stage)] for rank in reports(tmp_path_factory.mktemp("ranks"), (stage,))]

    return told_of


def reports(folder: Path, stages: tuple[int, ...]) -> list[dict[str, dict[str, Any]]]:
    """Run two ranks; their reports by rank and stage."""
    save_model(folder / "adapter", is_tied=True)
    save_model(folder / "untied")
    (folder / "grouped.json").write_text(json.dumps(GROUPED))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        run_ranks("support.runs.rank_process", 2, folder, *stages)
    assert not (folder / "extensions").exists()  # a first start compiles nothing
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_trains(told: Told, stage: int, tmp_path: Path) -> None:
    config = run_config(
        save_model(tmp_path / "adapter", is_tied=True), learner={"shared_prompts": False}
    )
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(ITERATIONS):
        alone = train_iteration(models, random_iteration(iteration), config, 20).steps
        for mine, theirs in zip(alone, told(stage)[0]["steps"][iteration], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-5)


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
    told: Told, stage: int, options: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "adapter", is_tied=options != "low rank head")
    config = run_config(
        model, algorithm=GROUPED, learner=OPTIONS[options] | {"shared_prompts": False}
    )
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(2):
        alone = train_iteration(models, random_iteration(iteration), config, 20)
        assert alone.means["steps_left_out"] == 2.0
        for mine, theirs in zip(alone.steps, told(stage)[0][options][iteration], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_a_reward_model_as_one_does(told: Told, stage: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "adapter", is_tied=True)
    config = run_config(model, learner={"shared_prompts": False}, **PRIME)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration, theirs in enumerate(told(stage)[0]["prime"]["figures"]):
        alone = figures(models, config, iteration)
        assert {"reward_model_loss", "reward_model_accuracy", "process_advantage_ratio"} <= alone[
            0
        ].keys()
        assert iteration == 0 or alone[0]["process_largest_return"] > 0.001
        for one, two in zip(alone, theirs, strict=True):
            assert two == pytest.approx(one, abs=2e-5)
    assert [rank["prime"]["exported"] for rank in told(stage)] == [26, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_reward_steps_as_one_does(told: Told, stage: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "adapter", is_tied=True)
    config = run_config(model, learner={"shared_prompts": False}, **STEPS)
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration, theirs in enumerate(told(stage)[0]["step rewards"]):
        alone = train_iteration(models, random_iteration(iteration), config, 20).row_advantages
        assert theirs == pytest.approx(alone, abs=1e-5)
        assert max(map(abs, alone)) > 0.1


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_see_the_same_figures(told: Told, stage: int) -> None:
    for name in ("steps", "went_on", "resumed", "poisoned", "probe", "grouped", "step rewards"):
        assert told(stage)[0][name] == told(stage)[1][name]
    assert told(stage)[0]["prime"]["figures"] == told(stage)[1]["prime"]["figures"]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_resume_bitwise(told: Told, stage: int) -> None:
    assert told(stage)[0]["resumed"] == told(stage)[0]["went_on"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_row_on_one_rank_drops_the_step_on_both(told: Told, stage: int) -> None:
    assert sorted(told(stage)[0]["poisoned"]) == [0.0, 1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_with_sharded_weights_the_reference_is_sharded_too(told: Told, stage: int) -> None:
    shares = [rank["reference_share"] for rank in told(stage)]
    if stage == 3:
        assert sum(shares) == pytest.approx(1.0) and max(shares) < 0.6
    else:
        assert shares == [1.0, 1.0]


@pytest.mark.parametrize("stage", STAGES)
def test_only_rank_0_holds_the_published_weights(told: Told, stage: int) -> None:
    assert len(told(stage)[0]["published"]) == 26
    assert told(stage)[1]["published"] == []
