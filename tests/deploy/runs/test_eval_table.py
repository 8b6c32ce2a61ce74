"""The table of `prefixrl eval`: which runs have a mean, and why others have none."""

import msgspec
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.evaluation.accuracy import CHOICES, Accuracy
from prefixrl.common.evaluation.plans import ArmResult
from prefixrl.deploy.commands.eval_command import kind_of
from prefixrl.deploy.runs.eval_table import markdown, print_results
from support.paths import ROOT

EXAMPLES = ROOT / "deploy/examples"
MEAN_NOTE = "a line of several runs: their mean"


def result(run: str, kind: str, value: float, arm: str = "adapter") -> ArmResult:
    outcome = Accuracy(
        accuracy=value,
        ci95=(0.0, 1.0),
        interval="wilson",
        problems=10,
        by_family={},
        truncated_fraction=0.0,
    )
    return ArmResult(
        run=run,
        arm=arm,
        set="held",
        decoding="greedy",
        version=4,
        weights_digest="digest",
        prefix="",
        errors=0,
        accuracy=outcome,
        kind=kind,
    )


def test_runs_of_one_kind_have_a_mean() -> None:
    said = markdown([result("a", "prefix", 0.2), result("b", "prefix", 0.4)], [])
    assert "| 2 runs | adapter | greedy | 0.300 |" in said
    assert MEAN_NOTE in said and "have no mean" not in said


def test_runs_of_several_kinds_have_none_and_it_is_said_of_which_arm() -> None:
    actual = [result(run, kind, 0.2) for run, kind in (("a", "p"), ("b", "p"), ("c", "direct"))]
    said = markdown(actual, [])
    assert " runs |" not in said and MEAN_NOTE not in said
    assert (
        "adapter: runs of different kinds (mode, low-rank or whole weights, models) have no mean"
        in said
    )
    alone = [result(run, "p", 0.5, arm="no_prefix") for run in ("a", "b")]
    said = markdown([*actual, *alone], [])
    assert "| 2 runs | no_prefix | greedy | 0.500 |" in said and MEAN_NOTE in said
    assert "no_prefix: runs" not in said


def test_brackets_and_bars_of_names_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    actual = [result("lr[a=1]", "p", 0.2), result("x[/b]", "q", 0.4), result("a|b", "r", 0.4)]
    print_results(actual, [])
    said = capsys.readouterr().out
    assert "lr[a=1]" in said and "x[/b]" in said and "a|b" in said
    lines = markdown(actual, []).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table[:5]}) == 1


def test_one_run_has_neither_a_mean_nor_a_note_on_it() -> None:
    said = markdown([result("a", "p", 0.2)], [])
    assert "runs" not in said


def test_mode_low_rank_and_models_make_a_kind_and_nothing_else_does() -> None:
    run_file = EXAMPLES / "arithmetic/run.toml"
    usual = kind_of(load(run_file))
    assert usual == kind_of(load(run_file, ("seed=7", "algorithm.iterations=3")))
    others = {
        kind_of(load(run_file, ("learner.lora={}",))),
        kind_of(load(run_file, (f"target.model={EXAMPLES}/arithmetic/adapter",))),
        kind_of(load(run_file, (f"adapter.model={EXAMPLES}/arithmetic/target",))),
        kind_of(load(EXAMPLES / "arithmetic_direct/run.toml")),
    }
    assert len(others | {usual}) == 5


def test_choices_by_a_process_reward_model_have_a_table_of_their_own() -> None:
    plain = result("a", "p", 0.4)
    chosen = {name: 0.5 + index / 100 for index, name in enumerate(CHOICES)}
    actual = msgspec.structs.replace(plain.accuracy, majority=0.45, samples=4, chosen=chosen)
    said = markdown(
        [plain, msgspec.structs.replace(plain, decoding="sampled4", accuracy=actual)], []
    )
    names = "prm_last_max | prm_min_max | prm_product_max | prm_last_vote | prm_min_vote | prm_product_vote"
    assert f"| arm | decoding | accuracy | maj | {names} |" in said
    assert (
        "\n| adapter@4 | sampled4 | 0.400 | 0.450 | 0.500 | 0.510 | 0.520 | 0.530 | 0.540 | 0.550 |"
        in said
    )
    assert "prm_" not in markdown([plain], [])


def with_means(arm: str, means: dict[str, float], version: int = -1, prefix: str = "") -> ArmResult:
    value = sum(means.values()) / len(means)
    changed = {"version": version, "means": means, "asked": "the same", "prefix": prefix}
    return msgspec.structs.replace(result("a", "p", value, arm), **changed)


def test_arms_are_compared_problem_by_problem() -> None:
    none = with_means("no_prefix", {str(n): float(n < 4) for n in range(20)})
    trained = with_means("adapter", {str(n): float(n < 14) for n in range(20)}, version=4)
    said = markdown([none, trained], [])
    # Ten better, none worse: a chance of 2 in 2^10.
    assert (
        "| held | greedy | adapter@4 | no_prefix | +0.500 | +0.228 to +0.681 | 10 | 0 | 20 | 0.00195 |"
        in said
    )
    assert "McNemar" in said
    assert "less" not in markdown([none], [])
    other = msgspec.structs.replace(trained, questions_digest="other problems")
    assert "no_prefix | +" not in markdown([none, other], [])


def test_a_fixed_prefix_that_is_none_and_questions_that_were_trained_are_told() -> None:
    actual = with_means("fixed_prefix", {"a": 1.0})
    said = markdown([msgspec.structs.replace(actual, trained_on=3)], [])
    assert "a, fixed_prefix: no prefix did better than none on training problems" in said
    assert "a, held: 3 of its questions are in the training data" in said
    assert "did better" not in markdown([with_means("fixed_prefix", {"a": 1.0}, prefix="So ")], [])
