"""Limits of a run at a real endpoint: a process without a broker, then two scorers of one broker."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixrl.common.config.load import from_json, load
from prefixrl.common.engines.interface.base import Job
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.address import fixed_address
from prefixrl.common.wire.keys import client_key_file
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.permits import Permits
from prefixrl.scorer.served import endpoint
from prefixrl.scorer.served.chat_engine import ChatEngine
from prefixrl.scorer.served.load import load_served
from prefixrl.scorer.served.pacing import LOCAL_BEAT_S
from support import fakes
from support.completions_server import MODEL, CompletionsServer, Reply, Request, failure, serving
from support.keys import folder as folder_of_keys
from support.paths import EXAMPLE, ROOT

NEW_TOKENS = 6
BEAT_S = 0.2
QUESTION = b'[{"role": "user", "content": "?"}]\n'
PATIENT_S = 90.0
TOKENS = 20
"""Tokens of an answered request."""
TESTS = ROOT / "tests"


def paced_job(rows: int, key: str = "a") -> Job:
    """So many questions."""
    row = np.frombuffer(QUESTION, dtype=np.uint8).astype(np.int32)
    sampling = Sampling(temperature=0.7, max_new_tokens=NEW_TOKENS)
    draws = row_uniforms(3, "completion", rows, NEW_TOKENS)
    return Job(key, (row,) * rows, draws, sampling, frozenset())


def serve_rows(address: str, key_file: str, rows: int) -> None:
    """Be a scorer that takes turns from a broker and answers from a chat endpoint: so many rows are open, for ever."""
    link = Link(fixed_address(address, Path(key_file)), "scorer", BEAT_S)
    config = from_json(link.welcome().config_json)
    link.permits = Permits(BEAT_S)
    engine = load_served(config.model_of("scorer"), "scorer", config, permits=link.permits)
    jobs = 0
    while True:
        if engine.open_rows < rows:
            jobs += 1
            engine.submit(paced_job(rows, str(jobs)))
        engine.step(0.02)
        link.vitals.usage, link.vitals.progress = engine.usage, engine.progress
        link.vitals.activity, link.vitals.state = "waiting", engine.waits_for


def most_within(times_s: Sequence[float], window_s: float) -> int:
    """The largest number of times in a window that ends with one of them."""
    return max(sum(end_s - window_s < at_s <= end_s for at_s in times_s) for end_s in times_s)


def asked_s(server: CompletionsServer) -> list[float]:
    """Times of all requests for answers, trials included."""
    return [each.at_s for each in server.asked if each.path == "/v1/chat/completions"]


def answer(_request: Request) -> Reply:
    choice = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 6, "completion_tokens": TOKENS - 6}
    return Reply(content={"choices": [choice], "usage": usage}, after_s=0.05)


@contextmanager
def engine_of(server: CompletionsServer, **openai: Any) -> Iterator[ChatEngine]:
    keys = [f"scorer.openai.{key}={value}" for key, value in ({"api": "chat"} | openai).items()]
    target = (f"target.model={MODEL}", "target.placement=advice")
    config = load(
        EXAMPLE / "run.toml",
        ("scorer.engine=openai", f"scorer.openai.url={server.url}", *keys, *target),
    )
    with closing(ChatEngine(MODEL, config, lambda: None)) as engine:
        yield engine


@pytest.mark.slow
def test_a_process_without_a_broker_keeps_the_limit_and_names_it_while_rows_wait() -> None:
    with serving(answer) as server, engine_of(server, requests_per_minute=1200) as engine:
        engine.submit(paced_job(60))
        names, done, deadline_s = set(), False, time.monotonic() + PATIENT_S
        while not done and time.monotonic() < deadline_s:
            before = engine.progress
            done = bool(engine.step(0.01))
            if engine.waits_for:
                names.add(engine.waits_for)
                assert done or engine.progress > before  # it never looks like a hang
        assert done
        times_s = asked_s(server)
        assert len(times_s) == 61
        # 20 a second; the level of two heartbeats is more of two seconds than of a minute.
        assert most_within(times_s, 2.0) <= 1.02 * 2 * 20 + 2 * LOCAL_BEAT_S * 20
        assert engine.usage.limited_s > 1.0
    assert any(each.startswith("scorer.openai.requests_per_minute = 1200 (") for each in names)
    assert all("requests_per_minute" in each for each in names)


@pytest.mark.slow
def test_tokens_are_charged_before_a_request_and_corrected_by_its_usage() -> None:
    with serving(answer) as server, engine_of(server, tokens_per_minute=24_000) as engine:
        engine.submit(paced_job(60))
        deadline_s = time.monotonic() + PATIENT_S
        while not engine.step(0.01):
            assert time.monotonic() < deadline_s
        times_s = asked_s(server)
    # Of 400 tokens a second each request takes 20, once the first have shown it.
    assert len(times_s) == 61
    assert most_within(times_s, 2.0) <= 1.02 * 2 * 20 + 2 * LOCAL_BEAT_S * 20 + 2


@pytest.mark.slow
def test_a_wait_for_the_limit_of_the_run_uses_up_no_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(endpoint, "MOST_BACKOFF_S", 0.02)
    failed = list[float]()

    def script(request: Request) -> Reply | None:
        if len(asked_s(server)) > 1 and len(failed) < 2:
            failed.append(request.at_s)
            return Reply(500, failure("boom"))
        return answer(request)

    # A request every second, and patience for half of one.
    options = {"requests_per_minute": 60, "patience_s": 0.5}
    with serving(script) as server, engine_of(server, **options) as engine:
        engine.submit(paced_job(1))
        deadline_s, results = time.monotonic() + PATIENT_S, []
        while not results:
            assert time.monotonic() < deadline_s
            results = engine.step(0.02)
    ((row,),) = [result.rows for result in results]
    assert row.finish == "eos" and len(failed) == 2
    assert failed[1] - failed[0] > 0.5


# --- two scorers of one broker ---------------------------------------------------------------------------------------


@contextmanager
def scorers(
    server: CompletionsServer, folder: Path, rows: Sequence[int], **openai: Any
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Scorers with so many rows each, of a broker that divides the limits."""
    section = {"url": server.url, "model": MODEL, "api": "chat"} | openai
    config = fakes.run_on_disk(
        folder,
        target={"placement": "advice"},
        scorer={"engine": "openai", "openai": section, "max_new_tokens": NEW_TOKENS},
        broker={"heartbeat_s": BEAT_S, "silence_s": 3.0},
    )
    with fakes.serving(config):
        key_file = client_key_file(folder_of_keys(), "worker")
        # This file is also the program of such a scorer.
        command = [sys.executable, __file__, fakes.endpoint_of(config)]
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        processes = [
            subprocess.Popen([*command, str(key_file), str(count)], env=environment)
            for count in rows
        ]
        try:
            yield processes
        finally:
            for process in processes:
                fakes.end(process)


@pytest.mark.slow
def test_two_scorers_of_different_load_keep_the_limit_together_and_one_that_dies_returns_its_share(
    tmp_path: Path,
) -> None:
    limit_per_s = 40
    with (
        serving(answer) as server,
        scorers(server, tmp_path, (48, 12), requests_per_minute=60 * limit_per_s) as (first, _),
    ):
        fakes.wait_until(lambda: len(asked_s(server)) > 100, "two scorers at work", PATIENT_S)
        time.sleep(6.0)
        before = len(asked_s(server))
        fakes.end(first)
        died_s = time.monotonic()
        time.sleep(7.0)
        times_s = asked_s(server)
    assert before > 100
    # A level holds two heartbeats; a window of five seconds is as sharp as a minute would be here.
    assert most_within(times_s, 5.0) <= 1.02 * 5 * limit_per_s + 2 * BEAT_S * limit_per_s
    # The other scorer has the whole limit once the first counts as dead.
    later_s = [at_s for at_s in times_s if died_s + 2.0 <= at_s < died_s + 6.0]
    assert len(later_s) >= 0.9 * 4 * limit_per_s


@pytest.mark.slow
def test_a_retry_after_of_one_scorer_holds_the_other_back(tmp_path: Path) -> None:
    limited_at_s = list[float]()

    def script(request: Request) -> Reply | None:
        if len(answered) > 60 and not limited_at_s:
            limited_at_s.append(request.at_s)
            return Reply(429, failure("slow down"), {"Retry-After": "8"})
        answered.append(request)
        return answer(request)

    answered = list[Request]()
    with serving(script) as server, scorers(server, tmp_path, (8, 8)):
        fakes.wait_until(lambda: bool(limited_at_s), "a Retry-After", PATIENT_S)
        time.sleep(11.0)
        times_s = asked_s(server)
    passed_s = [at_s - limited_at_s[0] for at_s in times_s]
    # Before that: requests under way, a heartbeat to the broker and one from it, on a busy machine.
    assert not [each for each in passed_s if 4.0 < each < 7.9]
    assert [each for each in passed_s if each > 8.0]


if __name__ == "__main__":
    serve_rows(sys.argv[1], sys.argv[2], int(sys.argv[3]))
