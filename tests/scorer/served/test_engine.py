"""The engine whose target is served elsewhere, against an endpoint of our own.

What is asked, and all that may go wrong.
"""

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from prefixrl.common.engines.interface.base import Continuation, Job, JobResult
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import row_seed, row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.scorer.served import endpoint, http_client
from prefixrl.scorer.served.engine import OpenAIEngine
from support.completions_server import (
    END,
    MODEL,
    TARGET,
    Reply,
    Request,
    config,
    engine_of,
    failure,
    serving,
    tokens_for,
    written,
)

PATIENT_S = 120.0
NEW = 6


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(endpoint, "MOST_BACKOFF_S", 0.1)
    monkeypatch.setattr(endpoint, "MOST_UNCONNECTED_S", 0.1)


def job(key: str = "a", *, rows: int = 8, temperature: float = 0.7, **cut: Any) -> Job:
    starts = tuple(np.arange(2, 5 + index, dtype=np.int32) for index in range(rows))
    draws = row_uniforms(3, "completion", rows, NEW)
    return Job(
        key,
        starts,
        draws,
        Sampling(temperature=temperature, max_new_tokens=NEW, **cut),
        frozenset({END}),
    )


def run(engine: OpenAIEngine, *jobs: Job) -> dict[str, tuple[Continuation, ...]]:
    for each in jobs:
        engine.submit(each)
    return {result.key: result.rows for result in finish(engine, len(jobs))}


def finish(engine: OpenAIEngine, jobs: int) -> list[JobResult]:
    """Run until so many jobs are done."""
    done: list[JobResult] = []
    deadline_s = time.monotonic() + PATIENT_S
    while len(done) < jobs:
        assert time.monotonic() < deadline_s, f"only {[each.key for each in done]} finished"
        done += engine.step(0.02)
    return done


def expected(each: Job) -> list[list[int]]:
    """Return the text that the fake model writes for a job."""
    return [
        tokens_for({"prompt": row.tolist(), "seed": row_seed(draws), "max_tokens": NEW})
        for row, draws in zip(each.rows, each.uniforms, strict=True)
    ]


def texts(rows: tuple[Continuation, ...]) -> list[list[int]]:
    return [row.tokens.tolist() for row in rows]


def once(reply: Reply, times: int = 1) -> Any:
    """A script that answers each row so many times with a reply, then as it should."""
    seen: dict[str, int] = {}

    def script(request: Request) -> Reply | None:
        key = str(request.body["prompt"])
        if request.body["max_tokens"] == 1 or seen.get(key, 0) >= times:
            return None
        seen[key] = seen.get(key, 0) + 1
        return reply

    return script


def test_a_row_is_continued_as_it_stands_with_its_own_seed_and_nothing_left_to_defaults() -> None:
    with serving() as server, engine_of(server) as engine:
        submitted_job = job(top_k=5, top_p=0.9, min_p=0.1)
        rows = run(engine, submitted_job)["a"]
        assert texts(rows) == expected(submitted_job)
        assert all(row.finish == "length" and row.logprobs.size == 0 for row in rows)
        assert {request.path for request in server.rows} == {"/v1/completions"}
        by_prompt = {len(request.body["prompt"]): request.body for request in server.rows}
        for row, draws in zip(submitted_job.rows, submitted_job.uniforms, strict=True):
            assert by_prompt[row.size] == {
                "model": MODEL,
                "prompt": row.tolist(),
                "max_tokens": NEW,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "seed": row_seed(draws),
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": [END],
                "ignore_eos": True,
                "add_special_tokens": False,
                "return_token_ids": True,
            }


def test_strict_servers_get_only_what_openais_api_has_and_their_text_is_kept() -> None:
    def script(request: Request) -> Reply:
        told = {"text": "\\boxed{7}", "finish_reason": "stop"}
        return Reply(content={"choices": [told]})

    strict = {"dialect": "openai", "prompt": "text"}
    with serving(script) as server, engine_of(server, **strict) as engine:
        submitted_job = job(rows=2)
        rows = run(engine, submitted_job)["a"]
        renderer = Renderer(str(TARGET), 64)
        assert [
            request.body for request in sorted(server.rows, key=lambda r: r.body["prompt"])
        ] == [
            {
                "model": MODEL,
                "prompt": renderer.decode_with_special(row),
                "max_tokens": NEW,
                "temperature": 0.7,
                "top_p": 1.0,
                "seed": row_seed(draws),
                "stop": ["<|end|>"],
            }
            for row, draws in sorted(
                zip(submitted_job.rows, submitted_job.uniforms, strict=True),
                key=lambda pair: renderer.decode_with_special(pair[0]),
            )
        ]
        assert [(row.text, row.finish) for row in rows] == [("\\boxed{7}", "eos")] * 2
        assert renderer.text(rows[0].tokens) == "\\boxed{7}"
        # Nothing was counted there, so it is counted here.
        assert engine.usage.prompt_tokens == sum(row.size for row in submitted_job.rows)


def test_an_empty_completion_and_one_that_stopped_are_answers() -> None:
    def script(request: Request) -> Reply | None:
        if request.body["max_tokens"] == 1:
            return None
        is_short = len(request.body["prompt"]) == 3
        tokens = [] if is_short else [5, END]
        return Reply(content=written(request.body, token_ids=tokens, finish_reason="stop"))

    with serving(script) as server, engine_of(server) as engine:
        rows = run(engine, job(rows=2))["a"]
    assert texts(rows) == [[], [5, END]]
    assert [row.finish for row in rows] == ["eos", "eos"]


def test_no_more_rows_are_asked_for_at_once_than_the_config_says_and_jobs_keep_their_order() -> (
    None
):
    script = lambda request: Reply(content=written(request.body), after_s=0.02)  # noqa: E731
    with serving(script) as server, engine_of(server, requests=4) as engine:
        assert (engine.seats, engine.room) == (4, 6)
        jobs = [job("a", rows=8), job("b", rows=8), job("c", rows=8)]
        done = run(engine, *jobs)
        assert [texts(done[each.key]) for each in jobs] == [expected(each) for each in jobs]
        assert server.most_at_once <= 4
        assert engine.usage.requests == 1 + 3 * 8
        assert engine.busy_row_s > 0 and engine.progress > 3 * 8 * NEW


def test_the_time_of_a_request_begins_when_it_is_its_turn() -> None:
    holds = threading.Event()

    def script(request: Request) -> Reply | None:
        if request.body["max_tokens"] > 1:
            holds.wait(PATIENT_S)
        return None

    with serving(script) as server, engine_of(server, requests=4) as engine:
        submitted_job = job(rows=8)
        engine.submit(submitted_job)
        deadline_s = time.monotonic() + PATIENT_S
        while server.most_at_once < 4 and time.monotonic() < deadline_s:
            engine.step(0.01)
        assert engine._endpoint.asking == 4
        holds.set()
        (result,) = finish(engine, 1)
        assert texts(result.rows) == expected(submitted_job)


def test_only_a_job_of_which_nothing_was_asked_can_be_cancelled() -> None:
    script = lambda request: Reply(content=written(request.body), after_s=0.2)  # noqa: E731
    with serving(script) as server, engine_of(server, requests=4) as engine:
        engine.submit(job("a", rows=8))
        engine.submit(job("b", rows=8))
        assert not engine.cancel("a") and not engine.cancel("unknown")
        assert engine.cancel("b") and not engine.cancel("b")
        assert [each.key for each in finish(engine, 1)] == ["a"]
        assert engine.step(0.02) == []


def test_a_context_is_filled_up_and_a_row_without_room_in_it_is_a_row_with_an_error() -> None:
    with serving() as server, engine_of(server) as engine:
        server_context = 128
        long = [np.full(size, 3, dtype=np.int32) for size in (server_context - 2, server_context)]
        submitted_job = Job(
            "a",
            tuple(long),
            row_uniforms(1, "c", 2, NEW),
            Sampling(temperature=0.0, max_new_tokens=NEW),
            frozenset(),
        )
        fitting, full = run(engine, submitted_job)["a"]
        assert fitting.tokens.size == 2 and fitting.finish == "length"
        assert full.finish == "error" and "128 tokens leave no room" in full.error


def test_an_answer_to_another_prompt_ends_the_worker() -> None:
    def script(request: Request) -> Reply | None:
        if request.body["max_tokens"] == 1:
            return None
        return Reply(content=written(request.body, prompt_token_ids=[0, *request.body["prompt"]]))

    with (
        serving(script) as server,
        engine_of(server) as engine,
        pytest.raises(UserError, match=r"continued another prompt .* tokens \[0, 2, 3, 4\]"),
    ):
        run(engine, job(rows=1))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(500, failure("a bug")),
        Reply(503, b"<html>no backend</html>"),
        Reply(408, failure("slow")),
        Reply(409, failure("conflict")),
        Reply(404, b"default backend - 404"),
        Reply(302, b"", headers={"location": "/login"}),
        Reply(204, b""),
        Reply(429, failure("slow down")),
        Reply(drops=True),
        Reply(content=b'{"choices": [{"text"'),
        Reply(content=b'{"choices": [{"text": "\xff", "finish_reason": "stop"}]}'),
        Reply(content={"choices": []}),
        Reply(content={"choices": [{"text": "", "finish_reason": "stop", "token_ids": [2**31]}]}),
        Reply(content={"choices": [{"text": "", "finish_reason": "abort"}]}),
    ],
    ids=lambda reply: "dropped" if reply.drops else f"{reply.status} {str(reply.content)[:20]}",
)
def test_what_fails_is_asked_again_with_the_same_seed_and_counted(reply: Reply) -> None:
    with serving(once(reply, times=2)) as server, engine_of(server) as engine:
        submitted_job = job(rows=3)
        assert texts(run(engine, submitted_job)["a"]) == expected(submitted_job)
        for row in submitted_job.rows:
            bodies = [r.raw for r in server.rows if r.body["prompt"] == row.tolist()]
            assert len(bodies) == 3 and len(set(bodies)) == 1
        assert (engine.usage.requests, engine.usage.retries) == (1 + 3, 2 * 3)
        assert engine.usage.completion_tokens == 1 + 3 * NEW
        assert (engine.usage.limited_s > 0) == (reply.status == 429)
        assert engine.waits_for == ""


def test_a_huge_answer_is_not_read_to_its_end_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "MOST_BYTES", 4096)
    with (
        serving(once(Reply(content=b'{"choices": "' + b"x" * 10_000_000))) as server,
        engine_of(server) as engine,
    ):
        submitted_job = job(rows=2)
        assert texts(run(engine, submitted_job)["a"]) == expected(submitted_job)
        assert engine.usage.retries == 2


@pytest.mark.slow
def test_nothing_is_asked_before_the_time_that_a_rate_limit_names() -> None:
    limited_at_s: list[float] = []

    def script(request: Request) -> Reply | None:
        if request.body["max_tokens"] > 1 and not limited_at_s:
            limited_at_s.append(time.monotonic())
            return Reply(429, failure("slow down"), {"Retry-After": "2"})
        return None

    with serving(script) as server, engine_of(server, requests=1) as engine:
        submitted_job = job(rows=4)
        assert texts(run(engine, submitted_job)["a"]) == expected(submitted_job)
        _first, *later = [request.at_s for request in server.rows]
        assert len(later) == 4
        assert min(later) - limited_at_s[0] >= 2.0 - 0.01
        assert engine.usage.limited_s >= 1.0
        assert engine.usage.retries == 1


def test_a_server_that_is_killed_and_comes_back_on_its_port_loses_nothing() -> None:
    script = lambda request: Reply(content=written(request.body), after_s=0.05)  # noqa: E731
    with serving(script) as server, engine_of(server, requests=4) as engine:
        jobs = [job("a", rows=16), job("b", rows=16)]
        for each in jobs:
            engine.submit(each)
        while len(server.rows) < 6:
            engine.step(0.01)
        server.close()
        waited_for, deadline_s = "", time.monotonic() + PATIENT_S
        while not waited_for and time.monotonic() < deadline_s:
            assert engine.step(0.01) == []
            waited_for = engine.waits_for
        assert server.url in waited_for and " s: " in waited_for
        progress = engine.progress
        engine.step(0.01)
        assert engine.progress > progress  # of waiting, which is bounded
        with serving(port=server.port):
            done = {result.key: result for result in finish(engine, 2)}
        assert [texts(done[each.key].rows) for each in jobs] == [expected(each) for each in jobs]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_row_that_is_refused_is_a_row_with_an_error_and_the_others_go_on(status: int) -> None:
    def script(request: Request) -> Reply | None:
        is_bad = len(request.body["prompt"]) == 4
        return Reply(status, failure("maximum context length is 3")) if is_bad else None

    with serving(script) as server, engine_of(server) as engine:
        submitted_job = job(rows=3)
        first, bad, last = run(engine, submitted_job)["a"]
        assert [first.tokens.tolist(), last.tokens.tolist()] == [
            expected(submitted_job)[0],
            expected(submitted_job)[2],
        ]
        assert bad.finish == "error" and not bad.tokens.size
        assert f"{status} maximum context length is 3" in bad.error
        assert len(server.rows) == 3 and engine.usage.retries == 0


def test_a_row_that_alone_fails_for_too_long_is_a_row_with_an_error() -> None:
    def script(request: Request) -> Reply | None:
        return Reply(500, failure("boom")) if len(request.body["prompt"]) == 4 else None

    with serving(script) as server, engine_of(server, patience_s=0.5) as engine:
        first, bad, last = run(engine, job(rows=3))["a"]
    assert (first.finish, bad.finish, last.finish) == ("length", "error", "length")
    assert "answers a trial, but not this row" in bad.error and "500 boom" in bad.error


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "86400"}])
def test_a_row_that_alone_is_limited_for_too_long_is_a_row_with_an_error(
    headers: dict[str, str],
) -> None:
    limit = Reply(429, failure("request too large"), headers)
    script = lambda request: limit if len(request.body["prompt"]) == 4 else None  # noqa: E731
    with serving(script) as server, engine_of(server, patience_s=0.5) as engine:
        first, bad, last = run(engine, job(rows=3))["a"]
    assert (first.finish, bad.finish, last.finish) == ("length", "error", "length")
    assert "answers a trial, but not this row" in bad.error and "too large" in bad.error


@pytest.mark.slow
def test_a_rest_that_outlasts_the_patience_is_told_and_ends_where_a_trial_is_answered() -> None:
    limited = threading.Event()

    def script(request: Request) -> Reply | None:
        if request.body["max_tokens"] > 1 and len(request.body["prompt"]) == 4:
            if not limited.is_set():
                limited.set()
                return Reply(429, failure("later"), {"Retry-After": "3600"})
        elif request.body["max_tokens"] > 1:
            limited.wait(PATIENT_S)
            return Reply(content=written(request.body), after_s=0.3)
        return None

    with serving(script) as server, engine_of(server, patience_s=2.0) as engine:
        submitted_job = job(rows=3)
        engine.submit(submitted_job)
        done: list[JobResult] = []
        said, deadline_s = set(), time.monotonic() + PATIENT_S
        while not done and time.monotonic() < deadline_s:
            before = engine.progress
            done = engine.step(0.02)
            if engine._endpoint.outage is None and engine.waits_for:
                said.add(engine.waits_for)
                assert done or engine.progress > before
        assert [texts(result.rows) for result in done] == [expected(submitted_job)]
    assert any("429 later (Retry-After: 3600 s)" in each for each in said)


def test_a_time_to_rest_that_is_over_does_not_undo_the_back_off() -> None:
    limit = Reply(429, failure("now"), {"Retry-After": "0"})
    with serving() as server, engine_of(server, patience_s=0.5) as engine:
        server.script = lambda request: limit
        with pytest.raises(PeerLost, match="429 now"):
            run(engine, job(rows=1))
        assert len(server.rows) < 30


@pytest.mark.slow
def test_a_row_that_never_has_an_answer_in_time_is_a_row_with_an_error() -> None:
    holds = threading.Event()

    def script(request: Request) -> Reply | None:
        if len(request.body["prompt"]) == 4:
            holds.wait(PATIENT_S)
        return None

    with serving(script) as server, engine_of(server, request_s=2.0) as engine:
        first, bad, last = run(engine, job(rows=3))["a"]
        holds.set()
        asked = [each for each in server.rows if len(each.body["prompt"]) == 4]
    assert (first.finish, bad.finish, last.finish) == ("length", "error", "length")
    assert "no answer within scorer.openai.request_s = 2" in bad.error and len(asked) == 2


def test_an_endpoint_that_stays_away_ends_the_worker_with_its_name_and_the_reason() -> None:
    with serving() as server, engine_of(server, patience_s=0.5) as engine:
        engine.submit(job())
        server.script = lambda request: Reply(503, failure("restarting"))
        run_out = rf"{server.url} has answered nothing for .*patience_s = 0.5\).* 503 restarting"
        with pytest.raises(PeerLost, match=run_out):
            run(engine, job("b"))


def test_a_rest_that_is_longer_than_the_patience_is_not_waited_for() -> None:
    limit = Reply(429, failure("come back tomorrow"), {"Retry-After": "86400"})
    with serving() as server, engine_of(server, patience_s=0.5) as engine:
        server.script = lambda request: limit
        with pytest.raises(PeerLost, match="429 come back tomorrow"):
            run(engine, job())


def test_a_key_that_is_taken_back_in_mid_run_ends_the_worker_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TARGET_KEY", "sk-secret")
    with serving() as server, engine_of(server, key_variable="TARGET_KEY") as engine:
        server.script = lambda request: Reply(401, failure("no such key: sk-secret"))
        with pytest.raises(UserError, match="environment variable TARGET_KEY") as told:
            run(engine, job())
        assert "sk-secret" not in str(told.value)
        assert len(server.rows) <= 8  # none of them twice


def test_the_key_comes_from_the_named_variable_and_is_told_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TARGET_KEY", "sk-secret")
    with serving(once(Reply(500, failure("sk-secret broke")))) as server:
        with engine_of(server, key_variable="TARGET_KEY") as engine:
            run(engine, job(rows=1))
            assert {each.headers["authorization"] for each in server.asked} == {"Bearer sk-secret"}
        assert "sk-secret" not in caplog.text + config(server.url).model_dump_json()
        assert "500 *** broke" in caplog.text


@pytest.mark.parametrize(("value", "said"), [(None, "is not set"), ("a\nb", "does not hold a key")])
def test_a_variable_without_a_key_is_told_before_anything_is_asked(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TARGET_KEY", raising=False)
    if value:
        monkeypatch.setenv("TARGET_KEY", value)
    with serving() as server:
        with (
            pytest.raises(UserError, match=f"'TARGET_KEY': this environment variable {said}"),
            engine_of(server, key_variable="TARGET_KEY"),
        ):
            pass
        assert server.asked == []
