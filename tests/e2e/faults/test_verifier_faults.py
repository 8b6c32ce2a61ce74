"""Real daemons whose verifier fails: rows are excluded and counted, never trained; a run that cannot go on says why."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.processes import titled
from support.runs import run_helper

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

RUN_FILE = run_helper.ROOT / "deploy/examples/arithmetic_direct/run.toml"
TRAINING = run_helper.ROOT / "deploy/examples/arithmetic/train.jsonl"
SMALL = (
    "algorithm.groups_per_iteration=16",
    "algorithm.iterations=3",
    "evaluation.problems=32",
    "broker.silence_s=2",
)
FAILS_SOMETIMES = """
import os
import zlib


def score(question, answer, gold):
    kind = zlib.crc32((question + answer).encode()) % 16
    if kind == 0:
        os._exit(7)
    if kind == 1:
        raise RuntimeError("the service is away")
    if kind == 2:
        return float("nan")
    return 0.75 if f"boxed{{{gold}}}" in answer else 0.25
"""
FAILS_ALWAYS = """
def score(question, answer, gold):
    raise RuntimeError("the service is away")
"""


def told(directory: Path) -> str:
    """Run `prefixrl inspect` and return its output."""
    given = [sys.executable, "-m", "prefixrl.deploy", "inspect", str(directory)]
    return subprocess.run(given, capture_output=True, text=True, check=True).stdout


def policy_that_writes_programs(folder: Path) -> Path:
    """The example's policy, whose words read `<llm-code># … so`, `print(4)</llm-code>`."""
    shutil.copytree(RUN_FILE.parent / "policy", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"]["decoders"] += [
        {"type": "Replace", "pattern": {"String": given}, "content": read}
        for given, read in (
            ("Let us", "<llm-code>#"),
            ("\\boxed{", "\nprint("),
            ("}", ")</llm-code>"),
        )
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def allow_files(launch: "subprocess.Popen[str]", spare: int | None) -> None:
    """Let verifiers open so many files more than their template has, or as many as they could before."""
    for verifier in titled(launch.pid, "prefixrl-verifier"):
        with suppress(psutil.Error, OSError):  # it has ended
            hard = verifier.rlimit(psutil.RLIMIT_NOFILE)[1]
            highest = max(map(int, os.listdir(f"/proc/{verifier.pid}/fd")), default=0)
            soft = hard if spare is None else highest + 1 + spare
            verifier.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.nightly
def test_a_sandbox_that_fails_in_mid_run_makes_no_row_wrong_and_trains_none(tmp_path: Path) -> None:
    directory, policy = tmp_path / "run", policy_that_writes_programs(tmp_path / "policy")
    settings = (
        f"adapter.model={policy}",
        "data.code=answers",
        "algorithm.groups_per_iteration=4",
        "algorithm.samples_per_prompt=4",
        "algorithm.iterations=5",
        "evaluation.problems=8",
        "broker.max_failure_share=1",
        "broker.requeues=1000",
        "scorer.verify_timeout_s=30",
    )
    with run_helper.launched(directory, *settings, run_file=RUN_FILE) as process:
        run_helper.wait_for(
            lambda: run_helper.trained_iterations(directory) >= 1, "the first iteration", 240
        )
        # No sandbox can be built without descriptors; a fork, which needs two, still can.
        run_helper.wait_for(
            lambda: (
                allow_files(process, 2)
                or run_helper.status(directory)["row_errors"].get("sandbox failed")
            ),
            "a sandbox that fails",
            120,
        )
        allow_files(process, None)
        summary = run_helper.finish(process, directory)
    run_helper.check_books(summary, directory)
    assert summary["groups"]["trained"] == 5 * 4
    assert set(summary["row_errors"]) == {"sandbox failed"}
    golds = {
        line["id"]: line["answer"] for line in map(json.loads, TRAINING.read_text().splitlines())
    }
    rows = [
        (row, golds[group["prompt_id"]])
        for group in run_helper.inspect(directory)
        for row in group["rows"]
    ]
    for row, gold in rows:
        if row["status"] == "error":
            assert row["advantage"] is None
        elif row["status"] == "ok":
            assert row["reward"] == (row["extracted"] == gold)
        else:  # wrong because of what it says, not because nobody could run it
            assert not re.search(r"\nprint\(\d+\)$", row["extracted"]), row
    assert any(row["status"] == "ok" for row, _ in rows)
    assert "sandbox failed" in told(directory)


@pytest.mark.nightly
def test_what_the_verifier_cannot_judge_is_excluded_by_cause_and_never_a_reward_of_zero(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FAILS_SOMETIMES)
    directory = tmp_path / "run"
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score")
    with run_helper.launched(directory, *settings, run_file=RUN_FILE) as process:
        summary = run_helper.finish(process, directory)
    run_helper.check_books(summary, directory)
    assert summary["groups"]["trained"] == 3 * 16
    rows = [row for line in run_helper.inspect(directory) for row in line["rows"]]
    failed = [row for row in rows if row["status"] == "error"]
    reasons = " ".join({row["extracted"] for row in failed})
    assert "its process ended 2 times" in reasons
    assert "RuntimeError: the service is away (mine.py, line 11)" in reasons
    assert "returned nan" in reasons
    assert summary["verifier_errors"] > 0
    kinds = {"process died", "function raised", "function returned no reward"}
    assert set(summary["row_errors"]) == kinds
    assert sum(summary["row_errors"].values()) >= len(failed)
    assert "texts without a verdict: " in told(directory)
    # No row has the reward of a wrong answer unless the length limit cut it; none that failed was trained.
    judged = [row for row in rows if row["status"] != "error"]
    assert {row["reward"] for row in judged if row["finish"] == "eos"} <= {0.25, 0.75}
    assert all(row["advantage"] is None for row in failed)
    assert all(row["advantage"] is not None for row in judged)


@pytest.mark.nightly
def test_a_verifier_that_fails_on_every_row_ends_the_run_by_name_with_its_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FAILS_ALWAYS)
    directory = tmp_path / "run"
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score", "rollout.answer_tokens=64")
    with run_helper.launched(directory, *settings, run_file=RUN_FILE) as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 5, output + run_helper.logs(directory)
    assert "error: iteration 0 gets no batch: " in output
    assert "could not be sampled or judged, more than broker.max_failure_share = 0.5" in output
    assert "RuntimeError: the service is away (mine.py, line 3)" in output
    assert "expired: verifier error on every row: function raised" in output
    for log in (directory / "logs").glob("*.log"):
        lines = log.read_text()
        assert "Traceback" not in lines or log.name.startswith("scorer"), log.name


def test_a_host_that_cannot_isolate_runs_no_programs_and_says_why(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    given = run_helper.command(directory, *SMALL, "data.code=answers", run_file=RUN_FILE)
    finished = subprocess.run([*inside, *given], capture_output=True, text=True, timeout=300)
    said = finished.stdout + finished.stderr + run_helper.logs(directory)
    assert finished.returncode != 0
    assert (
        "error: data.code = 'answers', or a problem set with coding tasks, needs isolated programs"
        in said
    )
    assert "needs isolated programs: this host cannot" in said
    assert "Traceback" not in said


def test_a_function_and_programs_cannot_both_judge(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_ALWAYS)
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score", "data.code=tests")
    given = run_helper.command(tmp_path / "run", *settings, run_file=RUN_FILE)
    finished = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert 'data.code = "tests"' in finished.stderr + finished.stdout
