"""Real daemons, advice in the target's question: a target in process, and one behind a chat endpoint."""

import json
from pathlib import Path

import pytest

from prefixrl.deploy.examples.advice.build import ADVICE
from prefixrl.deploy.examples.arithmetic.problems import FAMILIES, Problem
from support.completions_server import Reply, Request, serving
from support.paths import EXAMPLES
from support.runs.run_helper import check_books, finish, inspect, launched

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

RUN_FILE = EXAMPLES / "advice/run.toml"
CHAT_FILE = EXAMPLES / "advice/chat.toml"
SHORT = (
    "algorithm.iterations=3",
    "algorithm.groups_per_iteration=16",
    "evaluation.problems=32",
    "evaluation.selection_problems=8",
    "launch.scorers=1",
)
HABIT = 0
"""The procedure of a target that has no advice."""


def figures(directory: Path) -> list[dict[str, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["figures"] for line in lines]


def test_a_target_in_process_reads_the_advice(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SHORT, run_file=RUN_FILE) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 3 * 16
    assert all(line["leak_fraction"] == 0.0 for line in figures(directory))
    written = (directory / "evaluations/untrained_adapter.greedy.jsonl").read_text().splitlines()
    assert {json.loads(row)["prefix"] for row in written} <= set(ADVICE)
    rows = [row for line in inspect(directory) for row in line["rows"]]
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    assert summary["accuracy"]["no_prefix"] == 0.25


def obedient(request: Request) -> Reply:
    """Carry out the procedure that the advice names, as a vendor's model would."""
    *first, question = request.body["messages"][-1]["content"].split("\n")
    advice = first[0].removeprefix("advice: ") if first else ""
    procedure = ADVICE.index(advice) if advice in ADVICE else HABIT
    name, *words = question.split()
    families = [family for family in FAMILIES if family.name == name]
    answer = "A to Z"
    if families:
        problem = Problem(families[0], tuple(map(int, words)))
        answer = problem.worked(procedure)
    choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": 19}
    return Reply(content={"choices": [choice], "usage": usage})


def test_a_target_behind_a_chat_endpoint_is_advised_and_paid_for(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with serving(obedient) as endpoint:
        endpoint.models = Reply(content={"data": [{"id": "target"}]})
        served = (f'scorer.openai.url="{endpoint.url}"', "scorer.openai.completion_price=1000")
        with launched(directory, *SHORT, *served, run_file=CHAT_FILE) as process:
            summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["accuracy"]["no_prefix"] == 0.25
    requests = [request for request in endpoint.asked if request.path == "/v1/chat/completions"]
    trial_of_launch = 1
    assert summary["endpoint"]["completion_tokens"] == 19 * (len(requests) - trial_of_launch)
    assert all(len(request.body["messages"]) == 1 for request in requests)
    assert all(line["prefix_as_text_fraction"] == 0.0 for line in figures(directory))
