"""Real daemons whose verifier fails: rows are excluded and counted, never trained; a run that cannot go on says why."""

import subprocess
from pathlib import Path

import pytest

from run_helper import ROOT, check_books, command, finish, inspect, launched, logs

pytestmark = pytest.mark.timeout(400)

RUN_FILE = ROOT / "deploy/examples/arithmetic_direct/run.toml"
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


def test_what_the_verifier_cannot_judge_is_excluded_by_cause_and_never_a_reward_of_zero(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FAILS_SOMETIMES)
    directory = tmp_path / "run"
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score")
    with launched(directory, *settings, run_file=RUN_FILE) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 3 * 16
    rows = [row for line in inspect(directory) for row in line["rows"]]
    failed = [row for row in rows if row["status"] == "error"]
    reasons = " ".join({row["extracted"] for row in failed})
    assert "its process ended 2 times" in reasons
    assert "RuntimeError: the service is away (mine.py, line 11)" in reasons
    assert "returned nan" in reasons
    assert summary["verifier_errors"] > 0
    # No row has the reward of a wrong answer unless the length limit cut it; none that failed was trained.
    judged = [row for row in rows if row["status"] != "error"]
    assert {row["reward"] for row in judged if row["finish"] == "eos"} <= {0.25, 0.75}
    assert all(row["advantage"] is None for row in failed)
    assert all(row["advantage"] is not None for row in judged)


def test_a_verifier_that_fails_on_every_row_ends_the_run_by_name_with_its_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(FAILS_ALWAYS)
    directory = tmp_path / "run"
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score", "rollout.answer_tokens=64")
    with launched(directory, *settings, run_file=RUN_FILE) as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 5, output + logs(directory)
    assert "error: iteration 0 gets no batch: " in output
    assert "could not be sampled or judged, more than broker.max_failure_share = 0.5" in output
    assert "RuntimeError: the service is away (mine.py, line 3)" in output
    assert "expired: verifier error on every row" in output
    for log in (directory / "logs").glob("*.log"):
        lines = log.read_text()
        assert "Traceback" not in lines or log.name.startswith("scorer"), log.name


def test_a_host_that_cannot_isolate_runs_no_programs_and_says_why(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    given = command(directory, *SMALL, "data.code=answers", run_file=RUN_FILE)
    finished = subprocess.run([*inside, *given], capture_output=True, text=True, timeout=300)
    said = finished.stdout + finished.stderr + logs(directory)
    assert finished.returncode != 0
    assert 'data.code = "answers" needs programs to be isolated: this host cannot' in said.replace(
        "'", '"'
    )
    assert "Traceback" not in said


def test_a_function_and_programs_cannot_both_judge(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_ALWAYS)
    settings = (*SMALL, f"reward.function={tmp_path}/mine.py:score", "data.code=tests")
    given = command(tmp_path / "run", *settings, run_file=RUN_FILE)
    finished = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "data.code = 'tests'" in finished.stderr + finished.stdout
