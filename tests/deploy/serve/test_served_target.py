"""`prefixrl serve` with a target behind an endpoint, and the adapter alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from support.completions_server import Reply, Request, failure, serving
from support.runs.served_run import run_of, served

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROBLEM = "largest 9 2 4 7 0 5 6 8"
ADVISED = ('target.placement="advice"', "scorer.engine=openai", "scorer.openai.api=chat")


def answered(text: str) -> dict[str, Any]:
    """Return an answer of a chat endpoint."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


def test_an_answer_is_that_of_the_served_target_with_the_adapters_advice(tmp_path: Path) -> None:
    def vendor(request: Request) -> Reply:
        if "weather" in request.body["messages"][-1]["content"]:
            return Reply(400, failure("not about the weather"))
        return Reply(content=answered("It is \\boxed{9}."))

    run = run_of("arithmetic", tmp_path / "run")
    with serving(vendor) as endpoint:
        settings = (*ADVISED, f'scorer.openai.url="{endpoint.url}"', 'target.model="served-target"')
        with served(run, settings=settings) as server, server.client() as client:
            messages: Any = [{"role": "user", "content": PROBLEM}]
            answer = client.chat.completions.create(model=server.name, messages=messages)
            assert answer.choices[0].message.content == "It is \\boxed{9}."
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None and answer.usage.completion_tokens == 5
            question = endpoint.asked[-1].body["messages"][-1]["content"]
            assert question.startswith(f"{PROBLEM}\n\nAdvice, which may be wrong: ")
            with client.completions.create(
                model=server.name, prompt=PROBLEM, stream=True
            ) as streamed:
                text = "".join(event.choices[0].text for event in streamed)
            assert text == "It is \\boxed{9}."
            with pytest.raises(openai.APIStatusError, match="not about the weather") as refused:
                client.completions.create(model=server.name, prompt="sum the weather")
            assert refused.value.status_code == 502
            server.process.terminate()
            assert server.process.wait(60) == 0


def test_the_answer_with_the_most_votes_is_the_best_of_several(tmp_path: Path) -> None:
    texts = iter(
        [
            "It is \\boxed{7}.",
            "So \\boxed{0.5}.",
            "Half: \\boxed{\\frac{1}{2}}.",
            "It is \\boxed{3}.",
            "one greedy answer",
        ]
    )
    run = run_of("arithmetic", tmp_path / "run")
    trial = answered("trial")
    with serving(lambda request: Reply(content=trial)) as endpoint:
        settings = (*ADVISED, f'scorer.openai.url="{endpoint.url}"', 'target.model="served-target"')
        with served(run, "--best-of", "4", settings=settings) as server, server.client() as client:
            endpoint.script = lambda request: Reply(content=answered(next(texts)))
            answer = client.completions.create(model=server.name, prompt=PROBLEM)
            assert answer.choices[0].text in ("So \\boxed{0.5}.", "Half: \\boxed{\\frac{1}{2}}.")
            assert answer.usage is not None and answer.usage.completion_tokens == 4 * 5
            requests = endpoint.asked[-4:]
            assert {request.body["temperature"] for request in requests} == {0.7}
            assert len({request.body["seed"] for request in requests}) == 4
            greedy = client.completions.create(model=server.name, prompt=PROBLEM, temperature=0)
            assert greedy.choices[0].text == "one greedy answer"
            endpoint.script = lambda request: Reply(content=answered("\\boxed{1}"))
            two = client.completions.create(model=server.name, prompt=PROBLEM, n=2)
            assert len(two.choices) == 2
            endpoint.script = lambda request: Reply(400, failure("not today"))
            with pytest.raises(openai.APIStatusError, match="not today") as refused:
                client.completions.create(model=server.name, prompt=PROBLEM)
            assert refused.value.status_code == 502


def test_votes_are_refused_where_a_function_judges(tmp_path: Path) -> None:
    function = tmp_path / "reward.py"
    function.write_text("def always(question, answer, gold):\n    return 1.0\n")
    run = run_of("arithmetic", tmp_path / "run", f"reward.function={function}:always")
    command = [sys.executable, "-m", "prefixrl.deploy", "serve", str(run), "--checkpoint", "0"]
    done = subprocess.run(
        [*command, "--best-of", "4", "--port", "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "this run judges by reward.function" in done.stderr


def test_more_answers_to_choose_among_than_may_be_open_are_refused(tmp_path: Path) -> None:
    run = run_of("arithmetic", tmp_path / "run")
    command = [sys.executable, "-m", "prefixrl.deploy", "serve", str(run), "--checkpoint", "0"]
    options = ["--best-of", "9", "--most-answers", "8", "--port", "0"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--best-of 9: a request would take more answers than --most-answers 8" in done.stderr


def test_the_prefix_alone_is_what_the_adapter_writes(tmp_path: Path) -> None:
    run = run_of("arithmetic", tmp_path / "run")
    with (
        served(run, "--prefix-only", settings=("target.model=nowhere/target",)) as server,
        server.client() as client,
    ):
        answer = client.completions.create(model=server.name, prompt=PROBLEM)
        assert (
            answer.choices[0].text.startswith("Let us ") and "boxed" not in answer.choices[0].text
        )
        server.process.terminate()
        assert server.process.wait(60) == 0
