"""`prefixrl eval` on a real run: offline it finds what was found in training, answer by answer, and refuses other weights."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from run_helper import SMALL, finish, launched

pytestmark = pytest.mark.timeout(400)

SETTINGS = ("evaluation.every=2", "algorithm.iterations=6", "checkpoint.keep=9")
ALL_ARMS = ("no_prefix", "fixed_prefix", "prefix_clustering", "adapter")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    with launched(directory, *SMALL, *SETTINGS) as process:
        finish(process, directory)
    yield directory


def evaluate(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", "eval", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_every_second_version_was_judged_in_training_and_each_is_of_one_digest(run: Path) -> None:
    assert [point["version"] for point in summary(run)["accuracy_by_version"]] == [0, 2, 4, 6]
    for version in (2, 4, 6):
        found = rows(run / f"evaluations/adapter@{version}.greedy.jsonl")
        assert {row["version"] for row in found} == {version} and len(found) == 64
        assert len({row["weights_digest"] for row in found}) == 1


def test_offline_the_same_checkpoints_give_the_same_answers(run: Path) -> None:
    finished = evaluate(
        *(run, "--checkpoint", "4", "--checkpoint", "0", "--samples", "2", "--out", run / "t.md"),
        *(flag for arm in ALL_ARMS for flag in ("--arm", arm)),
    )
    assert finished.returncode == 0, finished.stderr
    at_4, at_0 = (run / f"eval/step_0000000{n}/evaluations" for n in (4, 0))
    trained = rows(at_4 / "adapter.heldout.greedy.jsonl")
    assert trained == rows(run / "evaluations/adapter@4.greedy.jsonl")
    before = rows(run / "evaluations/untrained_adapter.greedy.jsonl")
    assert rows(at_0 / "adapter.heldout.greedy.jsonl") == before
    alone = rows(at_4 / "no_prefix.heldout.greedy.jsonl")
    assert alone == rows(run / "evaluations/no_prefix.greedy.jsonl")
    assert not (at_0 / "no_prefix.heldout.greedy.jsonl").exists(), "judged once"

    results = json.loads((run / "eval/step_00000004/results.json").read_text())
    assert results["incomplete"] == []
    by_arm = {(each["arm"], each["decoding"]): each for each in results["results"]}
    assert set(by_arm) == {(arm, end) for arm in ALL_ARMS for end in ("greedy", "sampled2")}
    sampled = by_arm["no_prefix", "sampled2"]["accuracy"]
    assert (sampled["samples"], sampled["problems"]) == (2, 64)
    low, high = sampled["ci95"]
    assert low <= summary(run)["accuracy_sampled"]["no_prefix"] <= high
    clustering, fixed = (
        by_arm[arm, "greedy"]["accuracy"] for arm in ("prefix_clustering", "fixed_prefix")
    )
    assert clustering["accuracy"] <= fixed["accuracy"]
    table = (run / "t.md").read_text()
    assert "| adapter@4 | greedy |" in table and "| adapter@0 | sampled2 |" in table


def test_asked_again_nothing_is_judged_twice_and_other_settings_are_refused(run: Path) -> None:
    kept = run / "eval/step_00000004/evaluations/adapter.heldout.greedy.jsonl"
    written = kept.stat().st_mtime_ns
    assert evaluate(run, "--checkpoint", "4", "--arm", "adapter").returncode == 0
    assert kept.stat().st_mtime_ns == written
    other = evaluate(run, "--checkpoint", "4", "--set", "scorer.max_new_tokens=19")
    assert other.returncode == 2 and "scorer.max_new_tokens: 20 -> 19" in other.stderr


def test_a_checkpoint_that_holds_other_weights_than_were_published_is_refused(run: Path) -> None:
    weights = run / "checkpoints/step_00000006/hf/model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] * 1.5}, weights, metadata={"format": "pt"})
    refused = evaluate(run, "--arm", "adapter")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of version 6 holds weights with digest" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--checkpoint", "5"), "keeps 0, 2, 4, 6 and latest"),
        (("--arm", "adapter_"), "there is no such arm; known: no_prefix"),
        (("--data", "nowhere.jsonl"), "there is no such file"),
        (("--set", "scorer.max_new_token=3"), "did you mean 'max_new_tokens'"),
        (("--ema",), "holds no averaged weights"),
    ],
)
def test_what_cannot_be_judged_is_said_at_once(
    run: Path, flags: tuple[str, ...], said: str
) -> None:
    finished = evaluate(run, *flags)
    assert finished.returncode == 2 and said in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    finished = evaluate(tmp_path)
    assert finished.returncode == 2 and f"{tmp_path} holds no run" in finished.stderr
