"""The table of `prefixrl eval`: which runs have a mean, and why others have none."""

from prefixrl.common.config.load import load
from prefixrl.common.run.accuracy import Accuracy
from prefixrl.common.run.plans import ArmResult
from prefixrl.deploy.evaluate import _kind
from prefixrl.deploy.results import markdown
from support.paths import ROOT

EXAMPLES = ROOT / "deploy/examples"
MEAN_NOTE = "a line of several runs: their mean"


def result(run: str, kind: str, value: float, arm: str = "adapter") -> ArmResult:
    found = Accuracy(
        accuracy=value, ci95=(0.0, 1.0), interval="wilson", problems=10, by_family={}, truncated_fraction=0.0
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
        accuracy=found,
        kind=kind,
    )


def test_runs_of_one_kind_have_a_mean() -> None:
    said = markdown([result("a", "prefix", 0.2), result("b", "prefix", 0.4)], [])
    assert "| 2 runs | adapter | greedy | 0.300 |" in said
    assert MEAN_NOTE in said and "have no mean" not in said


def test_runs_of_several_kinds_have_none_and_it_is_said_of_which_arm() -> None:
    found = [result(run, kind, 0.2) for run, kind in (("a", "p"), ("b", "p"), ("c", "direct"))]
    said = markdown(found, [])
    assert " runs |" not in said and MEAN_NOTE not in said
    assert "adapter: runs of different kinds (mode, low-rank or whole weights, models) have no mean" in said
    alone = [result(run, "p", 0.5, arm="no_prefix") for run in ("a", "b")]
    said = markdown([*found, *alone], [])
    assert "| 2 runs | no_prefix | greedy | 0.500 |" in said and MEAN_NOTE in said
    assert "no_prefix: runs" not in said


def test_one_run_has_neither_a_mean_nor_a_note_on_it() -> None:
    said = markdown([result("a", "p", 0.2)], [])
    assert "runs" not in said


def test_mode_low_rank_and_models_make_a_kind_and_nothing_else_does() -> None:
    run_file = EXAMPLES / "arithmetic/run.toml"
    usual = _kind(load(run_file))
    assert usual == _kind(load(run_file, ("seed=7", "algorithm.iterations=3")))
    others = {
        _kind(load(run_file, ("learner.lora={}",))),
        _kind(load(run_file, (f"target.model={EXAMPLES}/arithmetic/adapter",))),
        _kind(load(run_file, (f"adapter.model={EXAMPLES}/arithmetic/target",))),
        _kind(load(EXAMPLES / "arithmetic_direct/run.toml")),
    }
    assert len(others | {usual}) == 5
