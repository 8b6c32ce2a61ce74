"""The start of an engine whose target is served elsewhere: what it refuses, and what it waits for."""

from collections.abc import Callable
from typing import Any

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.worker.join import EndedEarly
from prefixrl.scorer.served import endpoint
from prefixrl.scorer.served.engine import OpenAIEngine
from support.completions_server import (
    TARGET,
    CompletionsServer,
    Reply,
    Request,
    config,
    engine_of,
    failure,
    serving,
    written,
)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(endpoint, "MOST_BACKOFF_S", 0.1)
    monkeypatch.setattr(endpoint, "MOST_UNCONNECTED_S", 0.1)


def openai_engine(
    run: RunConfig, raise_if_hopeless: Callable[[], None] = lambda: None
) -> OpenAIEngine:
    return OpenAIEngine(str(TARGET), run, raise_if_hopeless)


def refused(server: CompletionsServer, **openai: Any) -> str:
    """Return the message of a scorer that cannot start."""
    with pytest.raises(UserError) as told, engine_of(server, **openai):
        pass
    assert told.value.exit_code == 2
    return str(told.value)


def test_a_wrong_key_or_none_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARGET_KEY", "sk-secret")
    with serving() as server:
        server.models = Reply(401, failure("Incorrect API key provided: sk-secret"))
        said = refused(server)
        assert "no key was sent" in said and "scorer.openai.key_variable" in said
        said = refused(server, key_variable="TARGET_KEY")
        assert "the key is that of the environment variable TARGET_KEY" in said
        assert "Incorrect API key provided: ***" in said


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        pytest.param(
            "http://user:sec/ret@host:1", "an address is not a URL", id="a slash in the password"
        ),
        pytest.param("ftp://user:secret@host:1", "scheme", id="ftp"),
        pytest.param("socks5://user:secret@host:1", "socksio", id="socks5"),
    ],
)
def test_a_proxy_of_the_environment_that_cannot_be_used_is_told_without_its_password(
    proxy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(UserError, match="HTTP_PROXY") as told:
        openai_engine(config("http://served.example/v1"))
    assert said in str(told.value)
    assert "sec" not in str(told.value).replace("[secure]", "")


def test_an_unknown_model_is_told_with_those_that_are_served() -> None:
    with serving() as server:
        server.models = Reply(content={"data": [{"id": "b"}, {"id": "a"}]})
        assert "'c' is not served there" in refused(server, model="c")
        assert refused(server, model="c").endswith("serves a, b; give one of these")
        assert "scorer.openai.model is missing" in refused(server)
        with engine_of(server, model="b"):
            assert server.asked[-1].body["model"] == "b"
        server.models = Reply(content={"data": []})
        assert "serves nothing" in refused(server)


def test_an_endpoint_without_a_list_of_models_takes_the_named_one() -> None:
    with serving() as server:
        server.models = Reply(404, failure("no such path"))
        assert "does it end in /v1?" in refused(server)
        with engine_of(server, model="mine"):
            assert server.asked[-1].body["model"] == "mine"


def test_an_endpoint_whose_list_of_models_always_fails_takes_the_named_one() -> None:
    """As `transformers serve` does where its model is a folder."""
    with serving() as server:
        server.models = Reply(500, b"Internal Server Error")
        with engine_of(server, model="mine", patience_s=20.0):
            assert server.asked[-1].body["model"] == "mine"
        lists = [request for request in server.asked if request.path == "/v1/models"]
        assert len(lists) == endpoint.MOST_FAILED_LISTS


def test_a_list_of_models_that_fails_once_is_asked_for_again() -> None:
    lists = [Reply(content={"data": [{"id": "b"}]}), Reply(502, b"")]
    with serving() as server:
        server.models = lambda request: lists.pop()
        assert "'c' is not served there" in refused(server, model="c")
    assert not lists


@pytest.mark.parametrize(
    "reply", [Reply(content=b"<html>hello</html>"), Reply(301, b"", {"Location": "https://x/"})]
)
def test_an_address_that_is_no_endpoint_is_a_mistake_of_the_user(reply: Reply) -> None:
    with serving() as server:
        server.models = reply
        assert "it is not a completions endpoint" in refused(server)


def test_a_setting_that_the_endpoint_refuses_is_told_with_what_was_asked() -> None:
    def script(request: Request) -> Reply | None:
        if "top_k" in request.body:
            return Reply(400, failure("Unrecognized request argument supplied: top_k"))
        return Reply(content={"choices": [{"text": "1", "finish_reason": "length"}]})

    with serving(script) as server:
        said = refused(server)
        assert "Unrecognized request argument supplied: top_k" in said
        assert '"top_k":0' in said and "scorer.openai.dialect" in said
        with engine_of(server, dialect="openai"):
            pass


def test_a_server_that_leaves_vllms_extensions_out_in_silence_is_refused() -> None:
    script = lambda request: Reply(content=written(request.body, token_ids=None))  # noqa: E731
    with serving(script) as server:
        assert "does not know vLLM's extensions" in refused(server)


def test_an_endpoint_that_is_still_starting_is_waited_for() -> None:
    replies = [Reply(drops=True), Reply(503, b"loading")]
    script = lambda request: replies.pop() if replies else None  # noqa: E731
    with serving(script) as server, engine_of(server) as engine:
        assert engine.usage.retries == 2 and not replies


def test_a_host_that_is_not_known_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "UNRESOLVED_S", 0.2)
    with pytest.raises(UserError, match="this host is not known here"):
        openai_engine(config("http://a..b/v1", patience_s=20.0))


def test_the_wait_for_an_endpoint_at_the_start_is_logged_and_can_be_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("FIRST_BACKOFF_S", "MOST_BACKOFF_S", "MOST_UNCONNECTED_S"):
        monkeypatch.setattr(endpoint, name, 30.0)
    with serving() as server:
        pass

    def raise_if_hopeless() -> None:
        if "waiting for http" in caplog.text:
            raise EndedEarly("asked to stop")

    with pytest.raises(EndedEarly):
        openai_engine(config(server.url, patience_s=60.0), raise_if_hopeless)


def test_an_address_where_nobody_listens_is_given_up_after_the_patience() -> None:
    with serving() as server:
        pass
    with pytest.raises(PeerLost, match=r"has answered nothing .* ConnectError"):
        openai_engine(config(server.url, patience_s=0.3, request_s=1.0))
