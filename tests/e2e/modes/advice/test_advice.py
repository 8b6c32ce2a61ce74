"""Real daemons, advice in the target's question: a target in process, and one behind a chat endpoint."""

import json
from pathlib import Path

import psutil
import pytest

from prefixrl.deploy.examples.advice.build import ADVICE
from prefixrl.deploy.examples.arithmetic.problems import FAMILIES, Problem
from support.completions_server import Reply, Request, failure, serving
from support.paths import EXAMPLES
from support.runs.run_helper import check_books, finish, inspect, launched, wait_for

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
KEY = "sk-planted-e0c9d2f4a1b7"
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


def test_a_target_behind_a_chat_endpoint_is_advised_and_paid_for_and_its_key_stands_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    monkeypatch.setenv("TARGET_KEY", KEY)

    def indiscreet(request: Request) -> Reply:
        """Answer, but repeat the key in one error that passes and in one that refuses a row."""
        number = len(endpoint.asked)
        if number in (20, 40):
            words = f"{request.headers['authorization']} is over its limit"
            return Reply(500 if number == 20 else 400, failure(words))
        return obedient(request)

    with serving(indiscreet) as endpoint:
        endpoint.models = Reply(content={"data": [{"id": "target"}]})
        served = (
            f'scorer.openai.url="{endpoint.url}"',
            "scorer.openai.completion_price=1000",
            "scorer.openai.key_variable=TARGET_KEY",
        )
        with launched(directory, *SHORT, *served, run_file=CHAT_FILE) as process:
            wait_for(lambda: len(endpoint.asked) > 40, "requests")
            started = [
                process.pid,
                *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
            ]
            arguments = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started)
            summary = finish(process, directory)
        assert KEY.encode() not in arguments
        assert {request.headers["authorization"] for request in endpoint.asked} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if KEY.encode() in path.read_bytes()]
    check_books(summary, directory)
    requests = [request for request in endpoint.asked if request.path == "/v1/chat/completions"]
    trial_of_launch = 1
    errors = 2
    answered = len(requests) - trial_of_launch - errors
    assert summary["endpoint"]["completion_tokens"] == 19 * answered
    assert sum(summary["row_errors"].values()) == 1
    assert all(len(request.body["messages"]) == 1 for request in requests)
    assert all(line["prefix_as_text_fraction"] == 0.0 for line in figures(directory))
