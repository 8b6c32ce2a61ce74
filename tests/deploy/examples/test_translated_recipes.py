"""PRIME's and OpenR's documented runs, translated: the files hold their settings, and the tiny forms run on a CPU."""

import itertools
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prefixrl.common.config.load import load
from prefixrl.deploy.examples.openr_math import build as openr
from prefixrl.deploy.examples.prime_eurus2 import build
from prefixrl.learner.check import budget
from prefixrl.learner.check.report import forecast
from support.models.process_models import loaded, marked
from support.models.recipes import recipe
from support.paths import EXAMPLES
from support.runs.run_helper import check_books, finish, inspect, launched

SIZES = {
    "directory", "adapter.model", "data.train", "data.eval", "rollout.max_prompt_tokens", "rollout.answer_tokens",
    "scorer.verifier_children", "scorer.prm.model", "scorer.prm.separator", "scorer.prm.max_tokens",
    "algorithm.groups_per_iteration", "algorithm.iterations", "algorithm.minibatches",
    "implicit_reward.lr", "learner.dtype", "learner.actor_lr", "learner.critic_lr", "learner.gradient_checkpointing",
    "learner.device_memory_gib", "learner.deepspeed.zero_optimization.stage", "broker.heartbeat_s", "broker.silence_s",
    "checkpoint.every", "launch.learner_ranks", "launch.rollouts", "launch.scorers",
}  # fmt: skip
"""Keys in which a tiny form may differ: places, sizes, rates and the machine. What is computed is the same."""


def flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    results: dict[str, Any] = {}
    for key, value in table.items():
        is_table = isinstance(value, dict) and f"{before}{key}" not in (
            "data.train",
            "data.eval",
            "learner.lora",
        )
        results |= flat(value, f"{before}{key}.") if is_table else {f"{before}{key}": value}
    return results


def keys_of(name: str) -> dict[str, Any]:
    return flat(tomllib.loads((EXAMPLES / f"{name}.toml").read_text()))


@pytest.mark.parametrize(
    ("run_file", "small"),
    [
        pytest.param("prime_eurus2/run", "prime_eurus2/tiny", id="prime_eurus2"),
        pytest.param("openr_math/run", "openr_math/tiny", id="openr_math"),
        pytest.param("openr_math/grpo", "openr_math/tiny_grpo", id="openr_math with GRPO"),
    ],
)
def test_the_tiny_form_computes_what_the_real_one_does(run_file: str, small: str) -> None:
    real, tiny = keys_of(run_file), keys_of(small)
    differing = {key for key in real.keys() | tiny.keys() if real.get(key) != tiny.get(key)}
    assert differing <= SIZES
    assert {"directory", "adapter.model"} < differing


def test_openrs_grpo_is_its_run_without_a_critic() -> None:
    run, grpo = keys_of("openr_math/run"), keys_of("openr_math/grpo")
    differing = {key for key in run.keys() | grpo.keys() if run.get(key) != grpo.get(key)}
    critic = {"algorithm.value_clip", "learner.critic_lr"}
    assert differing == {"directory", "algorithm.name", "algorithm.zscore", *critic}


def test_the_real_files_hold_the_settings_of_the_documented_runs() -> None:
    prime, theirs = (
        load(
            EXAMPLES / name / "run.toml",
            ("data.paths.math=.", "data.paths.math500=.", "data.paths.eurus2_rl=."),
        )
        for name in ("prime_eurus2", "openr_math")
    )
    algorithm, reward = prime.algorithm, prime.implicit_reward
    assert reward and reward.baseline == "code", "PRIME's program made its run, not its paper"
    assert reward and prime.filter.accuracy == (0.2, 0.8)
    assert (algorithm.groups_per_iteration, algorithm.samples_per_prompt, algorithm.iterations) == (
        256,
        4,
        592,
    )
    assert 256 * 4 / algorithm.minibatches == 256
    assert (prime.rollout.max_prompt_tokens, prime.rollout.answer_tokens) == (1024, 3072)
    assert (prime.learner.actor_lr, reward.lr, reward.beta, reward.grad_clip) == (
        5e-7,
        1e-6,
        0.05,
        10.0,
    )
    assert (reward.update, reward.reference, reward.granularity, reward.norm) == (
        "after",
        "freeze",
        "token",
        "batch_norm",
    )
    assert prime.data.train[0].keep_system and prime.data.eval[0].split == "validation"
    actions = theirs.algorithm.groups_per_iteration * theirs.algorithm.samples_per_prompt
    assert actions == 8 * 4 and theirs.algorithm.iterations == 50_000 // actions
    assert (theirs.algorithm.name, theirs.algorithm.kl_limit, theirs.algorithm.entropy) == (
        "appo",
        0.02,
        0.01,
    )
    assert (
        theirs.scorer.prm
        and theirs.scorer.prm.placement == "step"
        and theirs.scorer.prm.outcome_coefficient == 0
    )
    assert (theirs.learner.actor_lr, theirs.learner.critic_lr, theirs.learner.grad_clip) == (
        1e-6,
        5e-5,
        0.5,
    )


def figures(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)["figures"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


SHAPES = {"prime_eurus2": "Qwen/Qwen2.5-7B", "openr_math": "Qwen/Qwen2.5-1.5B"}
"""A model of the same shape as the recipe's, whose memory is known without its files."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_real_file_fits_the_gpus_it_states(name: str, tmp_path: Path) -> None:
    config = recipe(name, tmp_path, f"adapter.model={SHAPES[name]}")
    told = forecast(config)
    budget.check_fit(config, told.prompt_tokens)
    assert "activations: not counted" not in told.text


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_primes_run_trains_on_maths_and_code_of_its_format(tmp_path: Path) -> None:
    settings = ("algorithm.iterations=4", "evaluation.problems=16", "evaluation.every=2")
    with launched(tmp_path, *settings, run_file=EXAMPLES / "prime_eurus2/tiny.toml") as process:
        check_books(finish(process, tmp_path, timeout_s=600.0), tmp_path)
    actual = figures(tmp_path)
    assert len(actual) == 4
    assert actual[0]["process_largest_return"] == 0.0 < actual[-1]["process_largest_return"]
    kinds = {f"eurus2_rl/tiny_{kind}" for kind in build.KINDS}
    assert {
        name.partition("/")[2] for each in actual for name in each if name.startswith("reward/")
    } == {
        "eurus2_rl",
        *kinds,
    }
    assert all(0.0 <= actual[-1][f"filtered_fraction/{kind}"] <= 1.0 for kind in kinds)
    advantages = [
        json.loads(line) for line in (tmp_path / "advantages.jsonl").read_text().splitlines()
    ]
    assert len(advantages) == 4 * 8
    problems = [
        json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()
    ]
    assert {each["system"] for each in problems} == {build.SCAFFOLD}
    assert {each["code"] for each in problems} == {"none", "tests"}
    assert (tmp_path / "checkpoints/step_00000004/hf_reward/model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny_grpo", marks=pytest.mark.nightly)])
def test_openrs_run_becomes_right_by_the_scores_of_its_reward_model_alone(
    name: str, tmp_path: Path
) -> None:
    with launched(tmp_path, run_file=EXAMPLES / f"openr_math/{name}.toml") as process:
        summary = finish(process, tmp_path)
    check_books(summary, tmp_path)
    actual = figures(tmp_path)
    assert {each["steps"] for each in actual} == {2.0}
    for row in (row for line in inspect(tmp_path) for row in line["rows"]):
        assert row["reward"] == row["process"]["outcome"] and len(row["process"]["scores"]) == 2
        assert (
            row["process"]["ends"][-1] == len(row["prefix_ids"]) - 1
        )  # the EOS is no part of a step
    assert (
        sum(each["step_score"] for each in actual[-4:])
        > sum(each["step_score"] for each in actual[:4]) + 1.0
    )
    accuracy = summary["accuracy"]
    assert accuracy["trained_adapter"] > accuracy["untrained_adapter"] + 0.2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_openrs_tppo_runs_on_the_same_file(tmp_path: Path) -> None:
    settings = ("algorithm.iterations=4", "algorithm.name=tppo")
    with launched(tmp_path, *settings, run_file=EXAMPLES / "openr_math/tiny.toml") as process:
        check_books(finish(process, tmp_path), tmp_path)
    assert len(figures(tmp_path)) == 4
    assert {path.name for path in (tmp_path / "checkpoints").glob("step_*")} >= {"step_00000004"}


@pytest.mark.nightly
def test_the_build_makes_the_shipped_data_and_a_policy_of_the_shipped_shape(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build.build(tmp_path, 2, 0)
    shipped = EXAMPLES / "prime_eurus2"
    for name in (
        "data/train.jsonl",
        "data/validation.jsonl",
        "policy/tokenizer.json",
        "policy/chat_template.jinja",
    ):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes(), name
    own, theirs = (load_file(folder / "policy/model.safetensors") for folder in (tmp_path, shipped))
    assert {name: tensor.shape for name, tensor in own.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


@pytest.mark.nightly
def test_the_build_makes_a_reward_model_of_the_shipped_shape(tmp_path: Path) -> None:
    openr.build(tmp_path, 2, 0)
    shipped = EXAMPLES / "openr_math"
    assert (tmp_path / "prm/tokenizer.json").read_bytes() == (
        shipped / "prm/tokenizer.json"
    ).read_bytes()
    own, theirs = (load_file(folder / "prm/model.safetensors") for folder in (tmp_path, shipped))
    assert {name: tensor.shape for name, tensor in own.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def test_the_shipped_reward_model_scores_right_answers_above_corrupted_ones() -> None:
    form, model = loaded(EXAMPLES / "openr_math/prm", "step_tag")
    pairs = list(itertools.islice(openr.lessons(random.Random("held out")), 64))
    scores = model.scores(
        [marked(form, question, answer) for pair in pairs for question, answer, _ in pair]
    )
    assert (
        sum(min(right) > min(wrong) for right, wrong in zip(scores[::2], scores[1::2], strict=True))
        >= 0.9 * 64
    )


def test_the_problems_of_openrs_tiny_form_are_those_of_the_arithmetic_example() -> None:
    for name in ("train", "heldout"):
        own = [
            json.loads(line)
            for line in (EXAMPLES / f"openr_math/{name}.jsonl").read_text().splitlines()
        ]
        theirs = [
            json.loads(line)
            for line in (EXAMPLES / f"arithmetic/{name}.jsonl").read_text().splitlines()
        ]
        assert own == [
            {"problem": each["question"], "final_answer": each["answer"]}
            for each in theirs[: len(own)]
        ], name
