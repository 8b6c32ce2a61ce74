"""Real daemons, an adapter that reads the target's drafts: each problem is drafted once, whatever is killed."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from e2e.modes.advice.test_advice import RUN_FILE, SHORT, figures, obedient
from prefixrl.common.journal import journal
from prefixrl.deploy.examples.advice.build import ADVICE
from support.completions_server import CompletionsServer, serving
from support.paths import EXAMPLES
from support.runs.run_helper import (
    check_books,
    child,
    finish,
    inspect,
    launched,
    losses,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

DRAFTED = (
    *SHORT,
    "adapter.sees=draft",
    'adapter.prompt_template="{problem}\n{draft}"',
    "evaluation.sampled_candidates=1",
)
TRAINED, HELD_OUT, SELECTED = 20, 32, 8


def small_data(folder: Path) -> tuple[str, ...]:
    """Settings for so few problems that a short run has several epochs of them."""
    rows = (EXAMPLES / "advice" / "train.jsonl").read_text().splitlines(keepends=True)
    path = folder / "train.jsonl"
    path.write_text("".join(islice(rows, TRAINED)))
    return (f'data.train="{path}"',)


def questions(path: Path, count: int) -> set[str]:
    lines = path.read_text().splitlines()[:count]
    return {json.loads(line)["question"] for line in lines}


def every_question(folder: Path) -> set[str]:
    held_out = questions(EXAMPLES / "advice" / "heldout.jsonl", HELD_OUT)
    return questions(folder / "train.jsonl", TRAINED) | held_out


def served_settings(endpoint: CompletionsServer) -> tuple[str, ...]:
    return (
        "scorer.engine=openai",
        f'scorer.openai.url="{endpoint.url}"',
        "scorer.openai.api=chat",
        "scorer.openai.completion_price=1000",
        'target.model="served-target"',
    )


def greedy_requests(endpoint: CompletionsServer) -> Counter[str]:
    """Greedy requests by the content of their message, without the trial of a scorer's start."""
    bodies = [each.body for each in endpoint.asked if each.path == "/v1/chat/completions"]
    contents = (
        body["messages"][-1]["content"] for body in bodies if body.get("temperature") == 0.0
    )
    return Counter(content for content in contents if "A to Z" not in content)


def drafts_asked(endpoint: CompletionsServer) -> Counter[str]:
    requests = greedy_requests(endpoint)
    return Counter({each: n for each, n in requests.items() if not each.startswith("advice: ")})


def test_a_target_in_process_is_asked_for_a_draft_of_each_problem(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *DRAFTED, *small_data(tmp_path), run_file=RUN_FILE) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 3 * 16
    drafts = summary["drafts"]
    assert drafts["requests"] == len(every_question(tmp_path))
    assert drafts["failed"] == drafts["waiting"] == 0
    assert drafts["completion_tokens"] > 5 * drafts["requests"]
    groups = inspect(directory)
    assert all("boxed" in group["draft"] for group in groups)
    by_question = {group["question"]: group["draft"] for group in groups}
    assert all(by_question[group["question"]] == group["draft"] for group in groups)
    written = (directory / "evaluations/untrained_adapter.greedy.jsonl").read_text().splitlines()
    assert len(written) == HELD_OUT
    assert any(json.loads(row)["prefix"] in ADVICE for row in written)


def judge_untrained(directory: Path) -> None:
    command = [sys.executable, "-m", "prefixrl.deploy", "eval", str(directory)]
    command += ["--checkpoint", "0"]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_a_chat_endpoint_drafts_each_problem_once_whatever_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with serving(obedient) as endpoint:
        settings = (*DRAFTED, *served_settings(endpoint), *small_data(tmp_path))
        longer = ("algorithm.iterations=7", "checkpoint.every=2")
        with launched(directory, *settings, *longer, run_file=RUN_FILE) as process:
            wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
            wait_for(lambda: child(process, "prefixrl-broker"), "the broker").kill()
            wait_for(lambda: trained_iterations(directory) >= 4, "the fourth iteration")
            wait_for(lambda: child(process, "prefixrl-learner"), "the learner").kill()
            summary = finish(process, directory)
        check_books(summary, directory)
        draft_requests = drafts_asked(endpoint)
        assert draft_requests == dict.fromkeys(every_question(tmp_path), 1)
        drafts = summary["drafts"]
        assert drafts["requests"] == len(draft_requests)
        assert drafts["prompt_tokens"] == 20 * len(draft_requests)
        assert drafts["cost"] == pytest.approx(19 * len(draft_requests) * 1000 / 1e6)
        assert figures(directory)
        assert set(greedy_requests(endpoint).values()) == {1}, "a greedy answer was paid for twice"
        before = greedy_requests(endpoint)
        judge_untrained(directory)
        assert greedy_requests(endpoint) == before, "the run had judged all of it"
        (table,) = directory.glob("eval/step_00000000/results.json")
        results = json.loads(table.read_text())["results"]
        assert {result["arm"] for result in results} == {"no_prefix", "fixed_prefix", "adapter"}
        adopted = list(journal.read(directory / "eval/step_00000000/answers"))
        assert adopted and not any(record.is_draft for record in adopted), "the run has paid"


def texts(directory: Path) -> list[Any]:
    rows = ("prefix_ids", "completion", "reward")
    return [
        (group["seq"], group["draft"], [[row[name] for name in rows] for row in group["rows"]])
        for group in inspect(directory)
    ]


@pytest.mark.nightly
def test_a_bitwise_run_is_the_same_after_a_kill(tmp_path: Path) -> None:
    settings = (*DRAFTED, *small_data(tmp_path), "bitwise=true", "algorithm.max_staleness=0")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with launched(whole, *settings, run_file=RUN_FILE) as process:
        finish(process, whole)
    with launched(
        killed, *settings, "launch.scorers=2", "checkpoint.every=1", run_file=RUN_FILE
    ) as process:
        wait_for(lambda: trained_iterations(killed) >= 1, "the first iteration")
        wait_for(lambda: child(process, "prefixrl-learner"), "the learner").kill()
        finish(process, killed)
    assert texts(whole) == texts(killed)
    assert losses(whole) == losses(killed)
