"""`prefixrl warm-start`: it is stopped and goes on, and a run begins better with its result."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.completions_server import serving
from support.paths import EXAMPLES
from support.runs.run_helper import RUN_FILE, SMALL, finish, launched, wait_for

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STOPS = ('rollout.stop_tokens=[":"]',)
"""The opening alone: the adapter is too small to go on with the numbers of a question."""
OPTIONS = ("--problems", "60", "--samples", "4", "--epochs", "4", "--lr", "2e-3")


def command(directory: Path, *options: str, run_file: Path = RUN_FILE) -> list[str]:
    program = [sys.executable, "-m", "prefixrl.deploy", "warm-start", str(run_file)]
    settings = (f"directory={directory}", *STOPS)
    return [*program, *(word for each in settings for word in ("--set", each)), *options]


def warm_start(directory: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    called = command(directory, *options)
    return subprocess.run(called, capture_output=True, text=True, timeout=400)


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "warm_start.json").read_text())
    return record


def test_a_run_begins_better_with_a_warm_start_that_was_stopped_on_its_way(tmp_path: Path) -> None:
    directory, folder = tmp_path / "run", tmp_path / "run_warm_start"
    with subprocess.Popen(
        command(directory, *OPTIONS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for((folder / "endpoint").exists, "the answers", 120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "run the same command again to go on" in output
    done = warm_start(directory, *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    record = record_of(folder)
    assert record["answers"] == 60 * 5
    assert 0 < record["right"] < record["answers"]
    assert record["examples"] + record["held_out_examples"] == record["right"]
    losses = [line["held_out_loss"] for line in record["epochs"]]
    assert losses[record["best_epoch"]] == min(losses[1:]) < losses[0]
    again = warm_start(directory, *OPTIONS)
    assert again.returncode == 0 and record_of(folder) == record, "it was done already"
    answered_s = (folder / "evaluations/no_prefix.train.sampled4.jsonl").stat().st_mtime_ns
    longer = warm_start(directory, *OPTIONS, "--epochs", "5")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert record_of(folder)["epochs"][-1]["epoch"] == 5
    assert (folder / "evaluations/no_prefix.train.sampled4.jsonl").stat().st_mtime_ns == answered_s
    other = warm_start(directory, *OPTIONS, "--set", "scorer.temperature=0.9")
    assert other.returncode == 2 and "holds answers to other problems" in other.stderr
    begun = (f"adapter.init_from={folder}", "algorithm.iterations=1", *STOPS)
    with launched(directory, *SMALL, *begun) as process:
        accuracy = finish(process, directory)["accuracy_sampled"]
    assert accuracy["untrained_adapter"] > accuracy["no_prefix"] + 0.1


def test_a_run_of_another_form_cannot_begin_with_it(tmp_path: Path) -> None:
    directory, folder = tmp_path / "run", tmp_path / "warm"
    done = warm_start(directory, "--out", str(folder), "--all", "--problems", "8", "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    begun = (f"adapter.init_from={folder}", f"directory={directory}", "rollout.prefix_tokens=5")
    for program in ("launch", "launch --check"):
        called = [sys.executable, "-m", "prefixrl.deploy", *program.split(), str(RUN_FILE)]
        refused = subprocess.run(
            [*called, *(word for each in (*begun, *STOPS) for word in ("--set", each))],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "prefixes with rollout.prefix_tokens = 8, this run has 5" in refused.stderr


def test_a_target_behind_an_endpoint_is_asked_for_answers_and_its_tokens_are_counted(
    tmp_path: Path,
) -> None:
    with serving() as endpoint:
        served = ("--set", "scorer.engine=openai", "--set", f'scorer.openai.url="{endpoint.url}"')
        options = ("--all", "--problems", "8", "--samples", "2", "--epochs", "1")
        done = warm_start(tmp_path / "run", *served, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        record = record_of(tmp_path / "run_warm_start")
        assert record["answers"] == 8 * 3
        tokens = [each.body["max_tokens"] for each in endpoint.asked if each.body]
        answers = [count for count in tokens if count > 1]
        assert len(answers) == 8 * 3, "trials want one token"
        assert sum(answers) <= record["target_tokens"] <= sum(tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            ('target.placement="advice"', 'target.prompt_template="{problem}\n{prefix}"'),
            "the beginning of an answer is no advice",
            id="advice without a teacher",
        ),
        pytest.param(
            ('rollout.engine="simulated"',), "no adapter that could learn", id="no adapter"
        ),
    ],
)
def test_what_cannot_be_taught_is_refused(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    flags = [word for setting in settings for word in ("--set", setting)]
    refused = warm_start(tmp_path / "run", *flags)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_in_direct_mode_has_no_prefixes(tmp_path: Path) -> None:
    run_file = EXAMPLES / "arithmetic_direct/run.toml"
    called = [sys.executable, "-m", "prefixrl.deploy", "warm-start", str(run_file)]
    refused = subprocess.run(called, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert refused.returncode == 2 and "a warm start teaches prefixes" in refused.stderr


def test_a_folder_with_other_files_and_a_file_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "warm"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    refused = warm_start(tmp_path / "run", "--out", str(folder))
    assert refused.returncode == 2 and "is not empty and holds no warm start" in refused.stderr
    refused = warm_start(tmp_path / "run", "--out", str(folder / "notes.txt"))
    assert refused.returncode == 2 and "it is a file" in refused.stderr
