"""`--check` on the shipped recipes and on the example: the arithmetic a person would do by hand."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.implicit_reward import ImplicitRewardConfig
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.vllm import default_rows
from prefixrl.common.errors import ConfigError
from prefixrl.learner.__main__ import main
from prefixrl.learner.check import budget
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB, Footprint, learner_footprint
from prefixrl.learner.check.model_shapes import shape_of
from prefixrl.learner.check.report import forecast, forecast_gib, summed_rate
from prefixrl.learner.data import problems
from prefixrl.learner.models.trained_model import lr_at
from support.models.recipes import recipe
from support.paths import EXAMPLES

QWEN = 1_543_714_304
"""Parameters of Qwen2.5-1.5B."""
RECIPES = {"math_qwen2.5": 8888, "math_llama3.1": 7500}


def rows(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, "question": "?", "answer": 1}) + "\n" for i in range(count))
    )
    return path


def test_the_qwen_recipe_has_the_published_batch_arithmetic(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 8888)
    config = load(
        EXAMPLES / "math_qwen2.5/run.toml",
        (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}"),
    )
    said = forecast(config).text
    assert "88880 groups in 174 iterations" in said
    assert "512 groups x 8 rows = 4096 rows, 1 x 8 optimiser steps; 1389 in all" in said
    assert "at most 1024 groups = 8192 prefixes" in said
    # 2 models x (2 + 4 + 8 + 4) bytes, and a reference of 2 bytes each.
    assert (
        f"{QWEN * (2 * 18 + 2) / GIB:.2f} GiB  states (2 trained with optimiser, reference)" in said
    )
    assert f"a scorer: {7_615_616_512 * 2 / GIB:.2f} GiB of weights of 0.92 x 79.0 GiB" in said


def test_the_figure_of_memory_is_the_forecast_without_the_devices_own_context(
    tmp_path: Path,
) -> None:
    config = recipe("math_qwen2.5", tmp_path)
    plan = budget.rank_plan(config, forecast(config).prompt_tokens)
    assert plan is not None
    expected = (learner_footprint(plan).peak - CONTEXT_BYTES) / GIB
    assert forecast_gib(config, problems.training(config)) == {"forecast_gib": expected}
    assert "1024 rows at once; else by transformers, 128 rows at once" in forecast(config).text


def test_what_is_known_of_vllms_batch_is_told_before_it_runs(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 8888)
    own = (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}", "scorer.engine=vllm")
    path = EXAMPLES / "math_qwen2.5/run.toml"
    said = forecast(load(path, own)).text
    assert (
        "a scorer's batch: 1024 rows at once (vLLM's own choice), vLLM's own number of tokens per step"
        in said
    )
    declared = (
        "scorer.vllm.max_num_seqs=300",
        "scorer.vllm.options={ max_num_batched_tokens = 4096 }",
    )
    said = forecast(load(path, own + declared)).text
    assert "a scorer's batch: 300 rows at once (as declared), 4096 tokens per step" in said
    assert default_rows(None) == default_rows(24 * GIB) == 256
    assert default_rows(79 * GIB) == 1024


def test_the_llama_recipe_loads(tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", 7500)
    config = load(
        EXAMPLES / "math_llama3.1/run.toml",
        (f"data.train={data}", f"data.eval={data}", f"directory={tmp_path}"),
    )
    assert "75000 groups in 147 iterations" in forecast(config).text


def test_a_direct_run_counts_answers_and_has_no_target() -> None:
    said = forecast(load(EXAMPLES / "arithmetic_direct/run.toml")).text
    assert "at most 96 groups = 768 answers of up to 24 tokens" in said
    assert "no target: a scorer loads the adapter's tokenizer and needs no device" in said


def test_held_out_questions_that_are_trained_too_are_counted(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    for path, questions in ((train, ["a  b", "c", "d"]), (held_out, ["a b", "e", "d\n"])):
        path.write_text(
            "".join(json.dumps({"question": each, "answer": 1}) + "\n" for each in questions)
        )
    run_file = EXAMPLES / "arithmetic/run.toml"
    said = forecast(
        load(
            run_file,
            (f"data.train={train}", f"data.eval={held_out}", "data.family_column=question"),
        )
    ).text
    assert "warning: 2 of 3 questions of data.eval are in data.train too" in said
    assert "are in data.train too" not in forecast(load(run_file)).text


def test_worked_examples_count_as_a_part_of_every_prompt() -> None:
    run_file = EXAMPLES / "arithmetic/run.toml"
    plain = forecast(load(run_file)).prompt_tokens
    assert (
        forecast(
            load(run_file, (f"adapter.prompt_template={'so ' * 100}{{problem}}",))
        ).prompt_tokens
        >= plain + 100
    )


def refusal(config: RunConfig) -> str:
    try:
        budget.check_fit(config, forecast(config).prompt_tokens)
    except ConfigError as error:
        return str(error)
    return ""


# The second recipe's adapter is smaller: without the table of logits it has room for rows of unshared prompts.
@pytest.mark.parametrize(("name", "tokens"), [("math_qwen2.5", 16_384), ("math_llama3.1", 24_576)])
def test_the_recipes_fit_the_gpus_they_state_and_do_not_with_prompts_once_per_row(
    name: str, tokens: int, tmp_path: Path
) -> None:
    assert refusal(recipe(name, tmp_path)) == ""
    large = f"learner.micro_batch_tokens={tokens}"
    before = refusal(recipe(name, tmp_path, large, "learner.shared_prompts=false"))
    assert "and its device has 79.0 (learner.device_memory_gib; " in before
    assert "): it would fit with learner.gradient_checkpointing = true (" in before
    assert "learner.micro_batch_tokens = " in before
    assert refusal(recipe(name, tmp_path, large, "learner.gradient_checkpointing=true")) == ""


def test_every_model_of_the_recipes_has_a_shape_and_one_without_has_no_room(tmp_path: Path) -> None:
    for name in ("math_qwen2.5", "math_llama3.1", "prime_eurus2", "openr_math"):
        config = recipe(name, tmp_path)
        models = (config.adapter, config.target, config.scorer.prm, config.implicit_reward)
        named = {each.model for each in models if each is not None and getattr(each, "model", None)}
        assert all(shape_of(each) for each in named), named
    unknown = budget.engine_lines(
        recipe("math_qwen2.5", tmp_path, "target.model=some/Model-7B"), "scorer", 99, 79 << 30
    )
    assert (
        "room for" not in unknown[0]
        and "not counted, since the model's shape is not known" in unknown[0]
    )


def test_check_prints_the_table_then_refuses_with_exit_code_2(tmp_path: Path) -> None:
    recipe("math_qwen2.5", tmp_path)
    data = tmp_path / "train.jsonl"
    settings = (
        f"data.train={data}",
        f"data.eval={data}",
        f"directory={tmp_path}",
        "learner.micro_batch_tokens=16384",
        "learner.shared_prompts=false",
    )
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = CliRunner().invoke(main, [str(EXAMPLES / "math_qwen2.5/run.toml"), "--check", *flags])
    assert done.exit_code == 2
    assert "learner, per rank of 1, ZeRO stage 2:" in done.output


def test_a_target_that_leaves_no_room_for_one_row_is_refused_with_more_devices(
    tmp_path: Path,
) -> None:
    said = refusal(recipe("math_qwen2.5", tmp_path, "target.model=Qwen/Qwen2.5-72B"))
    assert "scorer.vllm.tensor_parallel_size = 2" in said
    assert (
        refusal(
            recipe(
                "math_qwen2.5",
                tmp_path,
                "target.model=Qwen/Qwen2.5-72B",
                "scorer.vllm.tensor_parallel_size=4",
            )
        )
        == ""
    )


def test_without_a_device_to_ask_nothing_is_refused_and_that_is_said(tmp_path: Path) -> None:
    config = load(EXAMPLES / "arithmetic/run.toml", ("learner.device=cpu",))
    assert refusal(config) == ""
    assert "of a device that is not here (learner.device_memory_gib)" in forecast(config).text


def test_a_critic_that_learns_alone_to_the_end_is_refused() -> None:
    run = ("learner.device=cpu", "algorithm.iterations=2", "algorithm.minibatches=4")
    steps = load(EXAMPLES / "arithmetic/run.toml", run).steps_in_all(1)
    with pytest.raises(
        ConfigError, match=rf"critic_warmup_steps = {steps}: the run has {steps} optimiser steps"
    ):
        forecast(
            load(EXAMPLES / "arithmetic/run.toml", (*run, f"algorithm.critic_warmup_steps={steps}"))
        )
    forecast(
        load(EXAMPLES / "arithmetic/run.toml", (*run, f"algorithm.critic_warmup_steps={steps - 1}"))
    )


def test_more_ranks_than_launch_starts_are_told_to_check_too(tmp_path: Path) -> None:
    flags = ["--set", "learner.device=cpu", "--nproc-per-node", "4"]
    done = CliRunner().invoke(main, [str(EXAMPLES / "arithmetic/run.toml"), "--check", *flags])
    assert "learner, per rank of 4, ZeRO stage 0:" in done.output


ARITHMETIC = EXAMPLES / "arithmetic/run.toml"
LAYER = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64
WHOLE = 40 * 64 + 2 * LAYER + 64
LOW_RANK = 4 * 2 * (4 * (64 + 64) + 3 * (64 + 256))
"""Rank 4: in each of 2 layers, q, k, v and o from 64 to 64, gate, up and down between 64 and 256."""
CRITIC, LORA, EMA = "algorithm.name=gae", "learner.lora={rank=4}", "learner.ema_decay=0.9"
GROUP, NO_KL = "algorithm.name=grpo", "algorithm.kl=0.0"
STAGE_2 = "learner.deepspeed={zero_optimization={stage=2}}"


def states(*settings: str) -> int:
    """The forecast's states of one rank."""
    plan = budget.rank_plan(load(ARITHMETIC, ("learner.dtype=bfloat16", STAGE_2, *settings)), 10)
    assert plan is not None
    result: Footprint = learner_footprint(plan)
    return result.states


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((CRITIC,), 2 * 18 * WHOLE + 2 * WHOLE),
        ((CRITIC, NO_KL, EMA), 2 * 18 * WHOLE + 4 * WHOLE),
        ((GROUP, LORA), 2 * WHOLE + 18 * LOW_RANK),
        ((CRITIC, LORA), 2 * 2 * WHOLE + 18 * (2 * LOW_RANK + 64)),
        ((CRITIC, LORA, EMA), 2 * 2 * WHOLE + 18 * (2 * LOW_RANK + 64) + 4 * LOW_RANK),
        (
            (GROUP, "learner.lora={rank=4, target_modules=['q_proj']}"),
            2 * WHOLE + 18 * 4 * 2 * (64 + 64),
        ),
        ((CRITIC, "launch.learner_ranks=4"), 2 * (2 + 16 / 4) * WHOLE + 2 * WHOLE),
        (
            (CRITIC, "launch.learner_ranks=4", "learner.deepspeed.zero_optimization.stage=3"),
            (2 * 18 + 2) / 4 * WHOLE,
        ),
    ],
)
def test_states_are_what_is_trained_with_its_optimiser_what_is_frozen_and_the_average(
    settings: tuple[str, ...], expected: int
) -> None:
    assert states(*settings) == expected


def test_low_rank_matrices_of_an_adapter_that_is_not_here_are_not_counted_and_that_is_said() -> (
    None
):
    said = forecast(load(ARITHMETIC, ("adapter.model=Qwen/Qwen2.5-1.5B", LORA, CRITIC))).text
    assert "(2 frozen, low-rank matrices not counted without the adapter's config.json)" in said
    assert "1,543.7 M" in said


def test_matrices_for_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"target_modules = \['nowhere'\]"):
        forecast(load(ARITHMETIC, ("learner.lora={target_modules=['nowhere']}",)))


def test_a_reward_model_stands_in_the_table(tmp_path: Path) -> None:
    config = recipe("math_qwen2.5", tmp_path)
    sizes = {"groups_per_iteration": 512, "samples_per_prompt": 8, "max_staleness": 1}
    plain, rewarded = (
        config.model_copy(
            update={"algorithm": AlgorithmConfig.model_validate({"name": name} | sizes | kl)}
            | reward
        )
        for name, kl, reward in (
            ("rloo", {"kl": 0.0}, {}),
            ("prime", {}, {"implicit_reward": ImplicitRewardConfig()}),
        )
    )
    one, two = (forecast(each).text for each in (plain, rewarded))
    assert (
        "reward model" not in one
        and "1 trained with optimiser, reward model, 1 frozen of its size" in two
    )
    plans = [budget.rank_plan(each, 110) for each in (plain, rewarded)]
    assert plans[0] and plans[1]
    more = learner_footprint(plans[1]).states - learner_footprint(plans[0]).states
    assert more == plans[0].parameters * 20


def test_a_rate_that_moves_no_small_model_is_named_and_the_examples_is_not() -> None:
    example = EXAMPLES / "arithmetic/run.toml"
    said = forecast(load(example)).text
    assert "over 100 optimiser steps: no weight moves by more than about 1.4e-02" in said
    assert "hardly moves" not in said
    assert "first iterations: 3200 answers (1152 of them to choose a fixed prefix: " in said
    assert "as many as in 12.5 iterations; 2048 after training" in said
    small = forecast(load(example, ("learner.actor_lr=5e-7",))).text
    assert (
        "warning: that hardly moves a model of 0.1 M parameters" in small and "--size tiny" in small
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 100, 1389])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_the_summed_rate_is_that_of_the_schedule_step_by_step(
    steps: int, warmup_ratio: float, min_ratio: float
) -> None:
    slow = sum(lr_at(step, steps, 2e-4, warmup_ratio, min_ratio) for step in range(steps))
    assert summed_rate(2e-4, steps, warmup_ratio, min_ratio) == pytest.approx(slow)
