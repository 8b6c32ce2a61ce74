"""`prefixrl try-reward` as a user runs it: tables, exit codes, answers that a run has kept."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.config.load import load
from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import GroupScored, JournalRecord, RunHeader
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.wire.messages.groups import Prompt
from support import messages
from support.paths import EXAMPLE, EXAMPLES

OWN = """
def right(question, text, gold, prefix, tokens, finish):
    is_right = text.split()[-1:] == [gold] and text.startswith(prefix)
    return {"reward": float(is_right), "tokens": tokens, "cut": finish == "length"}


def always(question, text, gold):
    return 1
"""
DATA = EXAMPLE / "train.jsonl"


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", "try-reward", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def kept_run(directory: Path, mode: str = "prefix", **verdict: Any) -> Path:
    """A run whose journal has groups of two answers: right, and wrong."""
    example = EXAMPLE if mode == "prefix" else EXAMPLES / "arithmetic_direct"
    config = load(example / "run.toml", (f"directory={directory}",))
    directory.mkdir()
    write_format(directory)
    (directory / "config.json").write_text(config.model_dump_json())
    records: list[JournalRecord] = [RunHeader("r", 7, b"key")]
    for seq in range(200):
        texts = f"so it is {seq}", "so it is not"
        rows = [messages.row([5, 6], text="so" if mode == "prefix" else None) for _ in texts]
        verdicts = [
            messages.verdict(
                float(index == 0),
                completion=text,
                completion_tokens=9 * (mode == "prefix"),
                **verdict,
            )
            for index, text in enumerate(texts)
        ]
        group = messages.group(seq, *rows, prompt=Prompt(f"p{seq}", "?", str(seq)))
        records.append(GroupScored(messages.scored_group(group, *verdicts)))
    journal = Journal(directory / "journal")
    journal.append(records)
    journal.close()
    return directory


def test_a_right_reward_ends_with_0_and_a_table(mine: Path) -> None:
    done = run(f"{mine}:right", "--data", DATA, "--problems", 12)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"reward.function = {mine}:right; a call has 5 s" in done.stdout
    assert "answers are written as {gold}" in done.stdout
    assert "right answers earn what they must" in done.stdout


@pytest.mark.slow
def test_a_reward_for_everything_ends_with_1_and_names_what_it_pays(mine: Path) -> None:
    run_file, setting = EXAMPLE / "run.toml", f"reward.function={mine}:always"
    done = run(run_file, "--set", setting, "--problems", 12)
    assert done.returncode == 1
    assert "wrong answers earn more than 0" in done.stdout and "--most-wrong 1" in done.stdout
    assert "an instruction to a judge" in done.stdout
    assert run(run_file, "--set", setting, "--problems", 2, "--most-wrong", 1).returncode == 0
    assert run(f"{mine}:always", "--data", DATA, "--form", "so {gold}").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefix", "direct"])
def test_kept_answers_of_a_run_are_tried_with_what_the_run_knows(
    mode: str, mine: Path, tmp_path: Path
) -> None:
    done = run(f"{mine}:right", "--run", kept_run(tmp_path / "run", mode), "--data", DATA)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("kept answers"))
    assert row.split()[-5:] == ["256", "0", "0.500", "0.000", "1.000"]
    assert "rewards of kept answers: 0: 50.0%, 1: 50.0%" in done.stdout
    assert (
        "100.0% of them have the reward that the run gave them; its mean was 0.500" in done.stdout
    )
    assert "rewards differ in 128 of 128 of their groups" in done.stdout


def test_kept_answers_come_from_all_of_the_journal(tmp_path: Path, mine: Path) -> None:
    from prefixrl.learner.commands.try_reward import kept_cases

    cases = kept_cases(kept_run(tmp_path / "run"))
    groups = [each.group for each in cases]
    assert len(cases) == 256 and groups[0] == 0
    assert {each.answer.prefix for each in cases} == {"so"}
    assert {each.answer.tokens for each in cases} == {9}
    direct = kept_cases(kept_run(tmp_path / "direct", "direct"))
    assert {(each.answer.prefix, each.answer.tokens) for each in direct} == {("", 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["MINE:right"], "Give --data FILE or --run RUN", id="without problems"),
        pytest.param(["MINE:none", "--data", DATA], "has no 'none'", id="no such function"),
        pytest.param(["none.toml"], "cannot read the run file", id="no such run file"),
        pytest.param(
            ["MINE:right", "--data", DATA, "--form", "so"], "has no {gold}", id="no place"
        ),
        pytest.param(["MINE:right", "--data", "none.jsonl"], "none.jsonl", id="no such problems"),
        pytest.param(
            ["MINE:right", "--data", DATA, "--run", "RUN"],
            "scorer.keep_completions = true",
            id="a run without answers",
        ),
        pytest.param(["MINE:right", "--data", DATA, "--run", "none"], "none", id="no run"),
    ],
)
def test_what_a_user_gives_wrong_is_one_message_and_exit_code_2(
    arguments: list[Any], message: str, mine: Path, tmp_path: Path
) -> None:
    if "RUN" in arguments:
        kept_run(tmp_path / "run", status="error")
    places = {"MINE": str(mine), "RUN": str(tmp_path / "run")}
    done = run(*(places.get(str(each), str(each).replace("MINE", str(mine))) for each in arguments))
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
