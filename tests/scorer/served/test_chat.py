"""Targets behind a chat endpoint: what is asked, what answers mean, which endpoints are refused."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Continuation, Job
from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.prompts.rendering import ChatRenderer, texts_of
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.scorer.served import chat
from prefixrl.scorer.served.chat_engine import ChatEngine
from prefixrl.scorer.served.engine import OpenAIEngine
from prefixrl.scorer.served.protocol import Completed, Retry, RowRefused
from support.completions_server import CompletionsServer, Reply, Request, failure, serving
from support.paths import EXAMPLE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUESTION = "What is 2 + 2?"


def answered(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """Return an answer as OpenAI sends it."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text} | message,
        "finish_reason": finish,
    }
    usage = {"prompt_tokens": 11, "completion_tokens": 7}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}


def obedient(request: Request) -> Reply:
    """Continue a begun answer where it ended, as vLLM does; else answer anew."""
    turns = request.body["messages"]
    if turns[-1]["role"] == "assistant":
        return Reply(content=answered("NOPQRSTUVWXYZ"))
    return Reply(content=answered("It is \\boxed{4}."))


def config_of(server: CompletionsServer, *settings: str) -> RunConfig:
    return load(
        EXAMPLE / "run.toml",
        (
            "scorer.engine=openai",
            f'scorer.openai.url="{server.url}"',
            "scorer.openai.api=chat",
            "scorer.openai.patience_s=5",
            'target.model="served-target"',
            'target.placement="advice"',
            *settings,
        ),
    )


def engine_of(config: RunConfig) -> ChatEngine:
    assert config.target is not None
    return ChatEngine(config.target.model, config, lambda: None)


def completed(config: RunConfig, engine: ChatEngine, advice: str = "") -> Continuation:
    renderer = texts_of(config, "scorer")
    row = renderer.prompt(QUESTION, advice=advice)
    sampling = Sampling(temperature=0.7, max_new_tokens=20)
    engine.submit(Job("a", (row,), np.full((1, 20), 0.5), sampling, renderer.stop_tokens))
    while not (results := engine.step(0.1)):
        pass
    return results[0].rows[0]


def test_a_row_is_asked_in_messages_and_its_answer_is_a_text() -> None:
    with serving(obedient) as server:
        config = config_of(server, 'target.system="Be brief."', "scorer.openai.seeded=false")
        engine = engine_of(config)
        row = completed(config, engine, "count on your fingers")
        engine.close()
    assert (row.text, row.finish, row.tokens.size) == ("It is \\boxed{4}.", "eos", 7)
    assert server.asked[-1].path == "/v1/chat/completions"
    assert server.asked[-1].body == {
        "model": "served-target",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": f"{QUESTION}\n\nAdvice, which may be wrong: count on your fingers",
            },
        ],
        "max_tokens": 20,
        "temperature": 0.7,
        "top_p": 1.0,
    }
    assert engine.usage.prompt_tokens == 22 and engine.usage.completion_tokens == 14


def test_a_row_without_advice_is_the_question_alone() -> None:
    with serving(obedient) as server:
        config = config_of(server)
        engine = engine_of(config)
        completed(config, engine)
        engine.close()
    assert server.asked[-1].body["messages"] == [{"role": "user", "content": QUESTION}]


def test_settings_that_the_endpoint_refuses_are_left_out_and_others_are_handed_on() -> None:
    with serving(obedient) as server:
        config = config_of(
            server,
            'scorer.openai.omit=["temperature", "top_p", "seed"]',
            'scorer.openai.extra={ reasoning_effort = "low" }',
        )
        engine = engine_of(config)
        completed(config, engine)
        engine.close()
    keys = {"model", "messages", "max_tokens", "reasoning_effort"}
    assert [set(request.body) for request in server.asked if request.body] == [keys, keys]


def test_an_endpoint_that_wants_the_other_name_of_the_limit_gets_it() -> None:
    def reasoning_model(request: Request) -> Reply:
        if "max_tokens" in request.body:
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return Reply(400, failure(message))
        return obedient(request)

    with serving(reasoning_model) as server:
        config = config_of(server)
        engine = engine_of(config)
        assert completed(config, engine).finish == "eos"
        engine.close()
    assert server.asked[-1].body["max_completion_tokens"] == 20


@pytest.mark.parametrize(
    ("settings", "prefill"),
    [
        pytest.param(["scorer.openai.dialect=vllm"], True, id="vllm"),
        pytest.param([], False, id="another server"),
    ],
)
def test_a_prefix_is_continued_where_the_trial_was(settings: list[str], prefill: bool) -> None:
    with serving(obedient) as server:
        config = config_of(server, 'target.placement="answer"', *settings)
        engine = engine_of(config)
        renderer = texts_of(config, "scorer")
        row = np.concatenate([renderer.prompt(QUESTION), renderer.encode("ABC")])
        sampling = Sampling(temperature=0.0, max_new_tokens=20)
        engine.submit(Job("a", (row,), np.zeros((1, 20)), sampling, renderer.stop_tokens))
        while not engine.step(0.1):
            pass
        engine.close()
    body = server.asked[-1].body
    assert body["messages"][-1] == {"role": "assistant", "content": "ABC"}
    assert body.get("continue_final_message", False) is prefill


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(content=answered("ABCDEFGHIJKLMNOPQRSTUVWXYZ")), id="begins anew"),
        pytest.param(Reply(content=answered("Sure!")), id="talks"),
        pytest.param(Reply(400, failure("prefill is not supported by this model")), id="refuses"),
    ],
)
def test_an_endpoint_that_continues_no_answer_is_refused_with_what_works(reply: Reply) -> None:
    with serving(lambda _: reply) as server:
        config = config_of(server, 'target.placement="answer"')
        with pytest.raises(UserError, match=r"does not continue .* use target.placement = .advice"):
            engine_of(config)


def test_a_chat_endpoint_is_named_where_completions_are_asked_for_and_the_other_way_round() -> None:
    def only(path: str) -> Any:
        return lambda request: None if request.path == path else Reply(404, failure("Not Found"))

    complaint = r'has no /chat/completions; try "completions"'
    with serving(only("/v1/completions")) as server, pytest.raises(UserError, match=complaint):
        engine_of(config_of(server))
    with serving(only("/v1/chat/completions")) as server:
        config = config_of(
            server,
            "scorer.openai.api=completions",
            f'target.model="{EXAMPLE / "target"}"',
        )
        with pytest.raises(UserError, match=r'has no /completions; try "chat", which needs target'):
            OpenAIEngine(str(EXAMPLE / "target"), config, lambda: None)


def read(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return chat.read(status, headers or {}, text, NOW)


@pytest.mark.parametrize(
    ("content", "text", "finish"),
    [
        pytest.param(answered("4"), "4", "eos", id="text"),
        pytest.param(answered(None), "", "eos", id="no content"),
        pytest.param(answered("", "length"), "", "length", id="the limit cut the reasoning"),
        pytest.param(answered("4", "length"), "4", "length", id="the limit cut the answer"),
        pytest.param(
            answered(None, refusal="I cannot help."), "I cannot help.", "eos", id="refusal"
        ),
        pytest.param(answered("4", reasoning_content="2+2"), "4", "eos", id="reasoning beside"),
        pytest.param(answered("4", reasoning="2+2"), "4", "eos", id="reasoning of a gateway"),
        pytest.param(
            answered(None)
            | {
                "choices": [
                    {
                        "message": {"content": [{"type": "text", "text": "4"}]},
                        "finish_reason": "stop",
                    }
                ]
            },
            "4",
            "eos",
            id="content in parts",
        ),
        pytest.param(answered("4") | {"usage": None}, "4", "eos", id="no usage"),
        pytest.param(answered("4") | {"usage": {"prompt_tokens": -3}}, "4", "eos", id="odd usage"),
        pytest.param(answered("4") | {"usage": "many"}, "4", "eos", id="usage of no shape"),
        pytest.param(answered("4") | {"service_tier": "x"}, "4", "eos", id="further keys"),
    ],
)
def test_an_answer_is_the_content_of_its_message(content: Any, text: str, finish: str) -> None:
    outcome = read(content)
    assert isinstance(outcome, Completed)
    assert (outcome.text, outcome.finish, outcome.tokens) == (text, finish, None)


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        pytest.param(answered("x", "content_filter"), 200, RowRefused, id="content filter"),
        pytest.param(answered(None, "tool_calls"), 200, RowRefused, id="a tool call"),
        pytest.param(answered(None, "abort"), 200, Retry, id="aborted"),
        pytest.param(b"<html><body>502 Bad Gateway</body></html>", 200, Retry, id="a page"),
        pytest.param(b"", 200, Retry, id="nothing"),
        pytest.param({"choices": []}, 200, Retry, id="no choice"),
        pytest.param({"error": {"message": "overloaded"}}, 200, Retry, id="an error with 200"),
        pytest.param({"choices": [{"text": "4", "finish_reason": "stop"}]}, 200, Retry, id="text"),
        pytest.param(b"<html>", 502, Retry, id="a page with 502"),
        pytest.param(failure("slow down"), 429, Retry, id="a limit"),
        pytest.param(failure("overloaded"), 529, Retry, id="overloaded"),
        pytest.param(failure("too long"), 400, RowRefused, id="a refused row"),
        pytest.param(failure("unprocessable"), 422, RowRefused, id="a refused form"),
    ],
)
def test_what_is_no_answer_is_asked_again_or_refused(content: Any, status: int, kind: type) -> None:
    assert isinstance(read(content, status), kind)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("scorer.truncated=extend", 'truncated = "extend" with openai.api = "chat"'),
        ("scorer.openai.prompt=text", 'openai.prompt = "text" has no effect with openai.api'),
        ("scorer.stop_tokens=[3]", r"stop_tokens = \[3\] has no effect with openai.api"),
        ("target.chat_template=false", "target.chat_template = false has no effect with scorer"),
        ("scorer.openai.extra={ model = 'x' }", "extra sets model: this software sets them itself"),
        ("scorer.top_k=5", "top_k = 5 with openai.dialect"),
    ],
)
def test_keys_without_a_meaning_for_messages_are_refused(setting: str, complaint: str) -> None:
    with serving(obedient) as server, pytest.raises(ConfigError, match=complaint):
        config_of(server, setting)


def test_a_target_behind_a_chat_endpoint_needs_no_files() -> None:
    with serving(obedient) as server:
        config = config_of(server, 'target.model="gpt-5-mini"')
    assert isinstance(texts_of(config, "scorer"), ChatRenderer)
    assert config.target is not None and config.target.model == "gpt-5-mini"
