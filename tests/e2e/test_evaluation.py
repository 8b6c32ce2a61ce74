"""`prefixrl eval` and `generate` on a real run.

What was found in training, answer by answer; other weights are refused.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from prefixrl.deploy.runs.checkpoints import config_of, weights_of
from support.runs.run_helper import ROOT, SMALL, finish, launched, wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SETTINGS = (
    "bitwise=true",
    "evaluation.every=2",
    "algorithm.iterations=6",
    "checkpoint.keep=9",
)
EXAMPLE = ROOT / "deploy/examples/arithmetic"
ALL_ARMS = ("no_prefix", "fixed_prefix", "prefix_clustering", "adapter")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run; the files of its problems are gone: what is judged afterwards are the problems that it kept."""
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    sources = directory.parent / "sources"
    sources.mkdir()
    for name in ("train", "heldout"):
        shutil.copyfile(EXAMPLE / f"{name}.jsonl", sources / f"{name}.jsonl")
    data = (f"data.train={sources}/train.jsonl", f"data.eval={sources}/heldout.jsonl")
    with launched(directory, *SMALL, *SETTINGS, *data) as process:
        finish(process, directory)
    shutil.rmtree(sources)
    yield directory


def prefixrl(*arguments: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def evaluate(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return prefixrl("eval", *arguments)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return result


def test_every_second_version_was_judged_in_training_and_each_is_of_one_digest(run: Path) -> None:
    assert [point["version"] for point in summary(run)["accuracy_by_version"]] == [0, 2, 4, 6]
    for version in (2, 4, 6):
        actual = rows(run / f"evaluations/adapter@{version}.greedy.jsonl")
        assert {row["version"] for row in actual} == {version} and len(actual) == 64
        assert len({row["weights_digest"] for row in actual}) == 1


def test_the_best_checkpoint_is_the_one_with_the_highest_greedy_accuracy(run: Path) -> None:
    judged = {
        point["version"]: point["accuracy"] for point in summary(run)["accuracy_by_version"][1:]
    }
    best = max(judged, key=lambda version: judged[version])  # of equals the first
    assert (run / "checkpoints/best").resolve().name == f"step_{best:08d}"
    assert weights_of(run, config_of(run, ()), "best", False).version == best


@pytest.mark.nightly
def test_another_run_begins_with_what_this_one_has_learnt(run: Path, tmp_path: Path) -> None:
    settings = (f"adapter.init_from={run}", "adapter.reference=model", "algorithm.iterations=1")
    with launched(tmp_path / "run", *SMALL, *settings) as process:
        finish(process, tmp_path / "run")
    begun = {
        row["prompt_id"]: row
        for row in rows(tmp_path / "run/evaluations/untrained_adapter.greedy.jsonl")
    }
    for row in rows(run / "evaluations/trained_adapter.greedy.jsonl"):
        other = begun.pop(row["prompt_id"])
        assert (other["prefix"], other["completion"]) == (
            row["prefix"],
            row["completion"],
        ) and other["version"] == 0
    assert not begun
    log = (tmp_path / "run/logs/learner.log").read_text()
    assert (
        f"begins with the adapter of {run}/checkpoints/step_00000006 (iteration 6) and its critic"
        in log
    )
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["figures"]["reference_kl"] > 0


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


def test_the_last_version_is_judged_once_in_training_and_told_as_both(run: Path) -> None:
    last = run / "evaluations/adapter@6.greedy.jsonl"
    assert last.read_bytes() == (run / "evaluations/trained_adapter.greedy.jsonl").read_bytes()
    names = [f"adapter@{version}" for version in (2, 4, 6)]
    asked = json.loads((run / "evaluations/asked.json").read_text())
    assert {f"{name}.greedy" for name in (*names, "trained_adapter")} <= set(asked)


def test_generated_answers_are_those_of_an_evaluation_row_by_row(run: Path) -> None:
    problems = rows(EXAMPLE / "heldout.jsonl")[:64]
    given = [json.dumps(each) for each in problems]
    given[20] = json.dumps({name: problems[20][name] for name in ("id", "question")})
    given.insert(10, "{no JSON")
    finished = prefixrl("generate", run, "--checkpoint", "4", stdin="\n".join(given))
    assert finished.returncode == 6, finished.stderr
    assert "stdin.jsonl row 11: bad row: JSON is malformed" in finished.stderr
    lines = lines_of(finished.stdout)
    assert [line["row"] for line in lines] == list(range(1, 66))
    bad = lines.pop(10)
    assert (bad["status"], bad["completion"], bad["version"]) == ("bad_row", "", -1)
    judged = rows(run / "evaluations/adapter@4.greedy.jsonl")
    same = ("prefix", "completion", "extracted", "finish", "version", "weights_digest")
    for line, row, problem in zip(lines, judged, problems, strict=True):
        assert [line[name] or "" for name in same] == [row[name] for name in same]
        assert (line["id"], line["question"]) == (problem["id"], problem["question"])
        if line["row"] == 22:
            assert (line["gold"], line["status"], line["reward"]) == (None, "no_gold", None)
            assert line["family"] == ""
        else:
            assert (line["gold"], line["reward"]) == (problem["answer"], row["reward"])
            assert (line["family"], line["columns"]) == (problem["family"], {})


@pytest.mark.nightly
def test_a_policy_alone_answers_in_direct_mode_several_times_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    flags = ("--adapter", EXAMPLE.parent / "arithmetic_direct/policy", "--samples", "2")
    limits = ("--temperature", "0.7", "--set", "rollout.answer_tokens=24", "--out", out)
    finished = prefixrl(
        "generate",
        *flags,
        *limits,
        "--data",
        EXAMPLE / "heldout.jsonl",
        "--set",
        "launch.scorers=1",
    )
    assert finished.returncode == 0 and finished.stdout == "", finished.stderr
    actual = rows(out)
    assert len(actual) == 2 * len(rows(EXAMPLE / "heldout.jsonl"))
    assert [line["sample"] for line in actual[:4]] == [0, 1, 0, 1]
    assert {(line["prefix"], line["prefix_tokens"]) for line in actual} == {("", 0)}
    assert min(line["completion_tokens"] for line in actual) > 0
    assert {line["status"] for line in actual} <= {"ok", "no_answer", "parse_fail"}
    pairs = zip(actual[::2], actual[1::2], strict=True)
    assert any(one["completion"] != other["completion"] for one, other in pairs), "drawn anew"


@pytest.mark.chaos
def test_an_interrupt_leaves_whole_lines(tmp_path: Path) -> None:
    out, many = tmp_path / "answers.jsonl", tmp_path / "many.jsonl"
    many.write_text(
        "".join(json.dumps({"question": f"q{index}"}) + "\n" for index in range(20_000))
    )
    models = ("--adapter", str(EXAMPLE / "adapter"), "--target", str(EXAMPLE / "target"))
    simulated = ("--set", "rollout.engine=simulated", "--set", "scorer.engine=simulated")
    command = [sys.executable, "-m", "prefixrl.deploy", "generate", *models, *simulated]
    with subprocess.Popen([*command, "--data", str(many), "--out", str(out)]) as process:
        wait_for(lambda: out.exists() and out.stat().st_size, "a first line")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    text = out.read_text()
    assert text.endswith("\n") and 0 < len(lines_of(text)) < 20_000


@pytest.mark.chaos
def test_asked_again_nothing_is_judged_twice_and_other_settings_are_refused(run: Path) -> None:
    kept = run / "eval/step_00000004/evaluations/adapter.heldout.greedy.jsonl"
    written = kept.stat().st_mtime_ns
    assert evaluate(run, "--checkpoint", "4", "--arm", "adapter").returncode == 0
    assert kept.stat().st_mtime_ns == written
    other = evaluate(run, "--checkpoint", "4", "--set", "scorer.max_new_tokens=19")
    assert other.returncode == 2 and "scorer.max_new_tokens: 20 -> 19" in other.stderr


@pytest.mark.nightly
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
        pytest.param(
            ("--checkpoint", "5"),
            "keeps 0, 2, 4, 6, best and latest",
            id="a checkpoint that is gone",
        ),
        pytest.param(
            ("--arm", "adapter_"), "there is no such arm; known: no_prefix", id="a misspelt arm"
        ),
        pytest.param(("--data", "nowhere.jsonl"), "there is no such file", id="no data file"),
        pytest.param(
            ("--set", "scorer.max_new_token=3"),
            "did you mean 'max_new_tokens'",
            id="a misspelt key",
        ),
        pytest.param(("--ema",), "holds no averaged weights", id="no averaged weights"),
    ],
)
def test_what_cannot_be_judged_is_said_at_once(
    run: Path, flags: tuple[str, ...], said: str
) -> None:
    finished = evaluate(run, *flags)
    assert finished.returncode == 2 and said in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param((), "nothing to answer with: give a RUN", id="nothing to answer with"),
        pytest.param(("nowhere",), "nowhere holds no run", id="no run"),
        pytest.param(
            ("RUN", "--checkpoint", "5"),
            "keeps 0, 2, 4, 6, best and latest",
            id="a checkpoint that is gone",
        ),
        pytest.param(
            ("RUN", "--adapter", "mine"),
            "--adapter and --target are for models without a run",
            id="a run and an adapter",
        ),
        pytest.param(
            ("RUN", "--data", "nowhere.jsonl"), "there is no such file", id="no data file"
        ),
        pytest.param(
            ("RUN", "--data", "-", "--data", "-"), "stdin can be read once only", id="stdin twice"
        ),
        pytest.param(
            ("RUN", "--samples", "2", "--temperature", "0"),
            "greedy answers are all alike",
            id="greedy samples",
        ),
        pytest.param(("--adapter", "./mine"), "there is no such folder", id="no adapter folder"),
        pytest.param(
            ("RUN", "--out", "/nowhere/answers.jsonl"),
            "No such file or directory",
            id="no folder for the output",
        ),
    ],
)
def test_what_cannot_be_answered_is_said_at_once(
    run: Path, flags: tuple[str, ...], said: str
) -> None:
    finished = prefixrl("generate", *(str(run) if flag == "RUN" else flag for flag in flags))
    assert finished.returncode == 2 and said in finished.stderr, finished.stderr
    assert "Traceback" not in finished.stderr and finished.stdout == ""


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    finished = evaluate(tmp_path)
    assert finished.returncode == 2 and f"{tmp_path} holds no run" in finished.stderr
