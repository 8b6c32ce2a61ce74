"""`prefixrl serve` with a target behind an endpoint, and the adapter alone."""

from pathlib import Path
from typing import Any

import openai
import pytest

from support.completions_server import Reply, Request, failure, serving
from support.runs.served_run import run_of, served

pytestmark = pytest.mark.timeout(300)

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
