"""The arms of a run: their figures, rows that could not be judged, arms without any judged row."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from prefixrl.common.evaluation.accuracy import EvaluatedRow
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import Summary
from prefixrl.common.wire.messages.groups import Prompt, ScoredGroup
from prefixrl.common.wire.messages.learner import Evaluate, EvaluationProgress
from prefixrl.common.wire.packing import token_ids
from prefixrl.deploy.runs.report import print_table
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.evaluation import requests as evaluations
from prefixrl.learner.evaluation.arms import Arms
from prefixrl.learner.run import summary
from support import messages
from support.fakes import SteppedClock, document, run_on_disk

Judge = Callable[[str, int], float | None]
"""(evaluation, problem) -> reward, None for an error."""


class JudgingClient:
    """Answers every evaluation at once, rewards being what `judge` says."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.asked: dict[str, Evaluate] = {}

    def evaluate(self, request: Evaluate) -> None:
        self.asked[request.name] = request

    def evaluation(self, name: str) -> tuple[EvaluationProgress, list[ScoredGroup]]:
        request = self.asked[name]
        groups = [
            scored(prompt, request.version, self._judge(name, index))
            for index, prompt in enumerate(request.prompts)
        ]
        return EvaluationProgress(
            name=name, total=len(groups), judged=len(groups), failed=0
        ), groups


def scored(prompt: Prompt, version: int, reward: float | None) -> ScoredGroup:
    judged = messages.verdict(reward or 0.0, status="error" if reward is None else "ok")
    prefixes = messages.group(0, messages.row([], version=None), prompt=prompt)
    return messages.scored_group(prefixes, judged, version=version, weights_digest="")


def evaluated(folder: Path, judge: "Judge | JudgingClient", **changes: object) -> Arms:
    """A finished evaluation of 4 held-out problems and one candidate."""
    config = run_on_disk(
        folder,
        rollout={"engine": "simulated"},
        data={"eval": str(folder / "train.jsonl")},
        evaluation={"problems": 4, "fixed_prefixes": ["so "], "selection_problems": 4} | changes,
    )
    client = judge if isinstance(judge, JudgingClient) else JudgingClient(judge)
    arms = Arms(config, cast(BrokerClient, client), Path(config.directory), 0)
    arms.ask_before_training()
    arms.ask_candidates([])
    arms.finish()
    return arms


def summarised(arms: Arms, directory: Path) -> Summary:
    (directory / "metrics.jsonl").touch()
    result = summary.summarise(document(), arms.outcome(), [], 0, 1.0)
    summary.write(result, directory)
    return result


def test_an_arm_of_which_nothing_could_be_judged_has_no_accuracy_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(name: str, problem: int) -> float | None:
        return None if name.startswith("no_prefix") or problem == 3 else float(problem == 0)

    arms = evaluated(tmp_path, judge)
    actual = summarised(arms, tmp_path / "run")
    assert "no_prefix" not in actual.accuracy | actual.accuracy_sampled | actual.accuracy_truncated
    assert actual.evaluations_incomplete == ["no_prefix.greedy", "no_prefix.sampled"]
    assert actual.accuracy["trained_adapter"] == pytest.approx(1 / 3)
    assert actual.accuracy_interval["trained_adapter"] == "wilson"
    # Four rows of each decoding of an arm without a verdict, one of the three others.
    assert actual.verifier_errors == 2 * 4 + 3 * 2 * 1
    print_table(tmp_path / "run")
    table = capsys.readouterr().out
    assert "no_prefix.greedy, no_prefix.sampled" in table
    assert " 0.000" not in table


def test_a_run_of_which_nothing_could_be_judged_has_a_summary_without_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = evaluated(tmp_path, lambda name, problem: None)
    actual = summarised(arms, tmp_path / "run")
    assert actual.accuracy == actual.accuracy_ci95 == {}
    assert "candidate-0" in actual.evaluations_incomplete
    assert not (tmp_path / "run/evaluations/fixed_prefix.greedy.jsonl").exists(), "none was best"
    assert actual.eval_problems == 0
    print_table(tmp_path / "run")
    assert "candidate-0" in capsys.readouterr().out
    summary.write(
        msgspec.structs.replace(
            actual, evaluations_incomplete=type(actual.evaluations_incomplete)()
        ),
        tmp_path / "run",
    )
    print_table(tmp_path / "run")
    said = capsys.readouterr().out
    assert (
        said.startswith("nothing was judged: the run has no held-out problems (data.eval)")
        and "arm" not in said
    )


@pytest.mark.parametrize(
    ("best", "chosen"), [("", b""), ("candidate-0", b""), ("candidate-1", b"so ")]
)
def test_no_prefix_at_all_is_a_candidate_and_the_first_of_equals(
    tmp_path: Path, best: str, chosen: bytes
) -> None:
    client = JudgingClient(lambda name, problem: float(name == best))
    evaluated(tmp_path, client)
    assert bytes(token_ids(client.asked["fixed_prefix.greedy"].prefix_tokens).tolist()) == chosen


def test_an_arm_stays_incomplete_when_its_file_is_read_again(tmp_path: Path) -> None:
    evaluated(tmp_path, lambda name, problem: None)
    again = evaluated(tmp_path, lambda name, problem: 1.0)
    assert "no_prefix.greedy" in again.requests.incomplete


def test_the_last_version_is_not_judged_again_where_it_was_due_in_training(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    config = run_on_disk(
        tmp_path,
        rollout={"engine": "simulated"},
        data={"eval": str(train)},
        evaluation={"problems": 4, "every": 2},
    )
    for last, is_due in ((4, True), (5, False)):
        client = JudgingClient(lambda name, problem: float(problem == 0))
        directory = tmp_path / str(last)
        directory.mkdir()
        arms = Arms(config, cast(BrokerClient, client), directory, 0)
        arms.advance(last)
        arms.ask_version(last)
        arms.finish()
        assert (f"adapter@{last}.greedy" in client.asked) is is_due
        assert ("trained_adapter.greedy" in client.asked) is not is_due
        assert arms.results()["trained_adapter"]["greedy"].accuracy == 0.25
        assert arms.curve()[-1].version == last
        assert (directory / "evaluations/trained_adapter.greedy.jsonl").exists()


@pytest.mark.parametrize("is_due", [True, False])
def test_a_last_evaluation_that_would_cost_too_much_is_named_incomplete_and_not_asked(
    is_due: bool, tmp_path: Path
) -> None:
    config = run_on_disk(
        tmp_path,
        rollout={"engine": "simulated"},
        data={"eval": str(tmp_path / "train.jsonl")},
        evaluation={"problems": 4, "every": 2},
    )
    client = JudgingClient(lambda name, problem: 1.0)
    directory = tmp_path / "judged"
    directory.mkdir()
    arms = Arms(config, cast(BrokerClient, client), directory, 0)
    arms.ask_before_training()
    version = 4 if is_due else 5
    arms.advance(version)
    arms.ask_version(version)
    asked = set(client.asked)
    arms.finish(is_affordable=False)
    assert set(client.asked) == asked
    judged = {"trained_adapter.greedy"} if is_due else set()
    last = {
        f"{arm}.{way}"
        for arm in ("trained_adapter", "fixed_prefix")
        for way in ("greedy", "sampled")
    }
    assert set(arms.outcome().incomplete) == last - judged
    assert ("trained_adapter" in arms.results()) is is_due


def test_fractional_rewards_are_reported_as_a_mean_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = summarised(evaluated(tmp_path, lambda name, problem: 0.25 * problem), tmp_path / "run")
    assert set(actual.accuracy_interval.values()) == {"bootstrap"}
    print_table(tmp_path / "run")
    assert "means of rewards, with bootstrap intervals: no_prefix, fixed" in capsys.readouterr().out


def test_a_family_of_which_an_arm_has_no_verdict_leaves_its_cell_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = summarised(evaluated(tmp_path, lambda name, problem: 1.0), tmp_path / "run")
    by_family = {"no_prefix": {"b": 0.25}, "trained_adapter": {"a": 0.5, "b": 0.75}}
    changed = msgspec.structs.replace(actual, accuracy_by_family=by_family)
    summary.write(changed, tmp_path / "run")
    print_table(tmp_path / "run")
    _, _, a, b, *_ = capsys.readouterr().out.partition("  family, greedy")[2].splitlines()
    assert a.split() == ["a", "0.50"] and b.split() == ["b", "0.25", "0.75"]
    assert a.index("0.50") == b.index("0.75")


def test_a_family_that_training_has_lowered_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    summarised(evaluated(tmp_path, lambda name, problem: 1.0), run)
    for arm, right in (("untrained_adapter", {"sum", "most"}), ("trained_adapter", {"most"})):
        rows = [
            EvaluatedRow(
                prompt_id=f"{family}-{number}",
                family=family,
                version=0,
                prefix="",
                completion="",
                extracted="",
                reward=float(family in right),
                status="ok",
            )
            for family in ("sum", "most")
            for number in range(20)
        ]
        json_lines.write(run / f"evaluations/{arm}.greedy.jsonl", rows)
    print_table(run)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "families that are answered worse than before training: sum -1.00 (-1.00 to -0.76)" in said
    )


class SlowClient(JudgingClient):
    """Answers at once, but what is named so only at a time of its own."""

    def __init__(self, clock: SteppedClock, due_s: dict[str, float]) -> None:
        super().__init__(lambda name, problem: 1.0)
        self._clock = clock
        self._due_s = due_s

    def evaluation(self, name: str) -> tuple[EvaluationProgress, list[ScoredGroup]]:
        if self._clock.monotonic() < self._due_s.get(name, 0.0):
            return EvaluationProgress(name=name, total=4, judged=3, failed=0), []
        return super().evaluation(name)


NEVER_S = 1e9


@pytest.mark.parametrize(
    ("due_s", "lost"),
    [
        ({"candidate-0": NEVER_S}, ["candidate-0"]),
        (
            {f"candidate-{index}": NEVER_S for index in range(3)},
            [f"candidate-{index}" for index in range(3)],
        ),
        ({"candidate-0": NEVER_S, "trained_adapter.greedy": 5000.0}, ["candidate-0"]),
        ({"candidate-0": NEVER_S, "no_prefix.sampled": 5000.0}, ["candidate-0"]),
        ({"no_prefix.sampled": NEVER_S}, ["no_prefix.sampled"]),
        ({"candidate-0": 3000.0, "fixed_prefix.greedy": 6000.0}, []),
    ],
)
def test_what_takes_unaskable_loses_itself_alone_and_what_is_asked_last_has_all_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due_s: dict[str, float], lost: list[str]
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(evaluations, "time", clock)
    arms = evaluated(tmp_path, SlowClient(clock, due_s), fixed_prefixes=["so ", "hm "])
    assert arms.requests.incomplete == lost
    actual = arms.results()
    assert set(actual["trained_adapter"]) == {"greedy", "sampled"}
    assert ("fixed_prefix" in actual) is ("candidate-2" not in lost)
