"""`prefixrl serve` answers OpenAI's own client, refuses by name what it cannot do, and outlives clients that leave."""

import asyncio
import json
import logging
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from starlette.applications import Starlette

from prefixrl.common.errors import ConfigError
from prefixrl.deploy.serve import listening
from prefixrl.deploy.serve.api_request import ApiError, Limits, read
from prefixrl.deploy.serve.listening import key_of
from support.fakes import wait_until
from support.models.base_models import edit
from support.paths import EXAMPLE, EXAMPLES
from support.runs.served_run import ServedRun, run_of, serve_command, served

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROBLEMS = [
    json.loads(line)["question"]
    for line in (EXAMPLE / "heldout.jsonl").read_text().splitlines()[:64]
]
LONG = ("rollout.own_stops=false", "rollout.stop_tokens=[0]", "rollout.answer_tokens=1500")
"""Settings of the direct example that make every answer take seconds: its padding is never drawn."""
MOST = 8
KEY = "k" * 32
MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """Adapter and target of the arithmetic example."""
    with served(run_of("arithmetic", tmp_path_factory.mktemp("served") / "arithmetic")) as result:
        yield result


def direct_run(folder: Path) -> Path:
    """A run of a policy with more positions, for answers that take long."""
    policy = Path(shutil.copytree(EXAMPLES / "arithmetic_direct/policy", folder / "policy"))
    edit(policy / "config.json", max_position_embeddings=2**16)
    return run_of("arithmetic_direct", folder / "direct", f"adapter.model={policy}")


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """Direct mode, whose answers take seconds; few at once."""
    run = direct_run(tmp_path_factory.mktemp("served"))
    with served(run, "--most-answers", str(MOST), settings=LONG) as result:
        yield result


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """Direct mode, whose answers take longer than the deadline; it asks for a key."""
    run = direct_run(tmp_path_factory.mktemp("served"))
    options = ("--key-variable", "SERVE_KEY", "--deadline", "3")
    settings = (*LONG, "rollout.answer_tokens=20000")
    with served(run, *options, settings=settings, environment={"SERVE_KEY": KEY}) as result:
        yield result


def begun(server: ServedRun, **given: Any) -> socket.socket:
    """A client whose stream has begun."""
    body = json.dumps(
        {"model": server.name, "prompt": PROBLEMS[0], "stream": True} | given
    ).encode()
    fields = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    fields += (f"Authorization: Bearer {KEY}",)
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    client = socket.create_connection(("127.0.0.1", server.port), 30)
    client.sendall(head.encode() + body)
    read = b""
    while b"data: {" not in read:
        part = client.recv(4096)
        assert part, read
        read += part
    return client


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b'{"\xff": 1}', b"[" * 100_000, b"{"])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is no JSON") as refused:
        read(body, Limits("m", 100), is_chat=False)
    assert refused.value.status == 400


def test_a_list_of_problems_gets_an_answer_each_and_a_chat_the_same_one(server: ServedRun) -> None:
    with server.client() as client:
        assert [each.id for each in client.models.list()] == ["arithmetic"]
        listed = client.completions.create(model=server.name, prompt=PROBLEMS[:4])
        chat = client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": [{"type": "text", "text": PROBLEMS[1]}]}],
        )
        alone = client.completions.create(model=server.name, prompt=PROBLEMS[1])
    assert [each.index for each in listed.choices] == [0, 1, 2, 3]
    assert all("\\boxed{" in each.text and each.finish_reason == "stop" for each in listed.choices)
    assert chat.choices[0].message.content == listed.choices[1].text == alone.choices[0].text
    assert chat.usage is not None and alone.usage is not None and listed.usage is not None
    assert chat.usage.completion_tokens == alone.usage.completion_tokens > 8
    assert listed.usage.total_tokens == listed.usage.prompt_tokens + listed.usage.completion_tokens


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_adds_up_to_the_whole_answer_with_its_usage(
    server: ServedRun, is_chat: bool
) -> None:
    asked: dict[str, Any] = {
        "model": server.name,
        "n": 3,
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 24,
    }
    texts, ends, usages = [""] * 3, [""] * 3, []
    with server.client() as client:
        if is_chat:
            asked["messages"] = [{"role": "user", "content": PROBLEMS[0]}]
        else:
            asked["prompt"] = PROBLEMS[0]
        create: Any = client.chat.completions.create if is_chat else client.completions.create
        whole = create(**asked)
        for event in create(**asked, stream=True, stream_options={"include_usage": True}):
            usages.append(event.usage)
            for choice in event.choices:
                texts[choice.index] += (choice.delta.content or "") if is_chat else choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [each.message.content if is_chat else each.text for each in whole.choices]
    assert ends == [each.finish_reason for each in whole.choices]
    assert usages[-1] == whole.usage and not any(usages[:-1])


def test_sampled_answers_follow_from_the_seed_and_differ_from_each_other(server: ServedRun) -> None:
    with server.client() as client:

        def texts(seed: int) -> list[str]:
            asked = client.completions.create(
                model=server.name, prompt=PROBLEMS[0], n=16, temperature=1.5, seed=seed
            )
            return [each.text for each in asked.choices]

        first = texts(5)
        assert first == texts(5) != texts(6)
        assert len(set(first)) > 1


def test_an_answer_ends_before_a_stop_and_at_its_most_tokens(server: ServedRun) -> None:
    with server.client() as client:
        whole = client.completions.create(model=server.name, prompt=PROBLEMS[0]).choices[0].text
        stopped = client.completions.create(
            model=server.name, prompt=PROBLEMS[0], stop=[" so", "never"]
        )
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (
            whole.partition(" so")[0],
            "stop",
        )
        for most in (2, 9):
            cut = client.completions.create(model=server.name, prompt=PROBLEMS[0], max_tokens=most)
            assert cut.usage is not None and cut.usage.completion_tokens == most
            assert (
                whole.startswith(cut.choices[0].text) and cut.choices[0].finish_reason == "length"
            )


def test_64_clients_at_once_get_what_each_gets_alone(server: ServedRun) -> None:
    actual = server.answers_at_once(PROBLEMS)
    with server.client() as client:
        alone = [
            client.completions.create(model=server.name, prompt=each).choices[0].text
            for each in PROBLEMS[::8]
        ]
    assert actual[::8] == alone
    assert server.is_idle()


@pytest.mark.parametrize(
    ("changed", "param", "said"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "allowed is null or 0"),
        ({"logprobs": 3}, "logprobs", "does not offer it"),
        ({"n": 4}, "n", "greedy answers are all alike"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"max_tokens": 10**6}, "max_tokens", "prefixrl serve --set"),
        ({"prompt": [1, 2]}, "prompt", "token ids"),
        ({"prompt": "sum 1 " * 900}, "prompt", "allowed are 1 to"),
        ({"extra_body": {"top_k": 4}}, "top_k", "leave it out"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_field_value_and_remedy(
    server: ServedRun, changed: dict[str, Any], param: str, said: str
) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": server.name, "prompt": PROBLEMS[0], **changed})
    assert refused.value.param == param
    assert said in refused.value.message


def test_an_earlier_turn_is_refused_and_so_is_another_model(server: ServedRun) -> None:
    turns: Any = [{"role": role, "content": "sum 1 2"} for role in ("user", "assistant", "user")]
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="single problems"):
            client.chat.completions.create(model=server.name, messages=turns)
        with pytest.raises(openai.NotFoundError, match="this server has"):
            client.completions.create(model="gpt", prompt="sum 1 2")


def test_other_bodies_hosts_and_paths_are_refused_in_openais_form(server: ServedRun) -> None:
    url = f"{server.url}/completions"
    for status, answer in (
        (400, httpx2.post(url, content=b"{", headers={"content-type": "application/json"})),
        (
            400,
            httpx2.post(url, content=b"[" * 100_000, headers={"content-type": "application/json"}),
        ),
        (
            413,
            httpx2.post(
                url, content=b" " * (MIB + 1), headers={"content-type": "application/json"}
            ),
        ),
        (415, httpx2.post(url, content=b"{}", headers={"content-type": "text/plain"})),
        (403, httpx2.get(f"{server.url}/models", headers={"host": "evil.example"})),
        (404, httpx2.get(f"{server.url}/embeddings")),
        (405, httpx2.get(url)),
    ):
        assert (answer.status_code, answer.json()["error"].keys()) == (
            status,
            {"message", "type", "param", "code"},
        )


@pytest.mark.slow
def test_a_key_is_asked_for(guarded_server: ServedRun) -> None:
    with (
        guarded_server.client("wrong") as client,
        pytest.raises(openai.AuthenticationError, match="missing or wrong"),
    ):
        client.models.list()
    with guarded_server.client(KEY) as client:
        assert (
            client.completions.create(model="direct", prompt=PROBLEMS[0], max_tokens=8)
            .choices[0]
            .text
        )
    assert KEY not in guarded_server.log.read_text()


def test_other_addresses_need_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    file.write_text(KEY)
    file.chmod(0o644)
    for host, variable, path, said in (
        ("0.0.0.0", None, None, "a key is needed"),
        ("127.0.0.1", None, file, "chmod 600"),
        ("127.0.0.1", "NOT_SET_ANYWHERE", None, "holds no key"),
        ("127.0.0.1", "SERVE_KEY", file, "two sources"),
    ):
        with pytest.raises(ConfigError, match=said):
            key_of(host, variable, path)
    file.chmod(0o600)
    assert key_of("0.0.0.0", None, file) == KEY


@pytest.mark.slow
def test_clients_killed_in_mid_stream_leave_an_empty_queue_and_no_memory(
    slow_server: ServedRun,
) -> None:
    memory = psutil.Process(slow_server.process.pid).memory_info
    before = 0
    for round_number in range(6):
        clients = [begun(slow_server) for _ in range(MOST)]
        assert slow_server.health["open_answers"] == MOST
        for client in clients:
            client.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # reset, as of a killed process
            client.close()
        slow_server.wait_until_idle()
        if round_number == 1:
            before = memory().rss
    assert memory().rss < before + 64 * MIB


@pytest.mark.slow
def test_a_flood_is_told_to_come_back_and_leaves_the_server_well(slow_server: ServedRun) -> None:
    def ask(_: int) -> int:
        with slow_server.client() as client:
            try:
                client.completions.create(model=slow_server.name, prompt=PROBLEMS[0], max_tokens=64)
            except openai.RateLimitError as refused:
                assert refused.response.headers["retry-after"] == "1"
                return 429
            return 200

    clients = [begun(slow_server) for _ in range(MOST)]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(64))) == [429] * 64
    for each in clients:
        each.close()
    slow_server.wait_until_idle()
    assert ask(0) == 200


@pytest.mark.slow
def test_a_request_past_its_deadline_ends_with_an_error_and_not_with_done(
    guarded_server: ServedRun,
) -> None:
    asked: dict[str, Any] = {"model": guarded_server.name, "prompt": PROBLEMS[0]}
    with (
        guarded_server.client(KEY) as client,
        pytest.raises(openai.InternalServerError, match="within 3 s"),
    ):
        client.completions.create(**asked)
    headers = {"authorization": f"Bearer {KEY}"}
    streamed = httpx2.post(
        f"{guarded_server.url}/completions", json=asked | {"stream": True}, headers=headers
    ).text
    assert "within 3 s" in streamed.splitlines()[-2] and "[DONE]" not in streamed
    guarded_server.wait_until_idle()


@pytest.mark.slow
def test_sigterm_lets_open_answers_end_and_exits_with_0(guarded_server: ServedRun) -> None:
    client = begun(guarded_server, max_tokens=48)
    guarded_server.process.send_signal(signal.SIGTERM)
    read = b""
    while part := client.recv(65536):
        read += part
    client.close()
    assert b"data: [DONE]" in read
    assert guarded_server.process.wait(30) == 0
    assert "Traceback" not in guarded_server.log.read_text()


@pytest.mark.nightly
def test_a_client_that_sends_its_head_drop_by_drop_is_cut_off(server: ServedRun) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        wait_until(lambda: _is_closed(client), "the end of the connection", 20.0)
    assert server.is_idle()


def _is_closed(client: socket.socket) -> bool:
    client.settimeout(0.5)
    try:
        client.sendall(b"a")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.nightly
def test_greedy_answers_are_those_of_generate(server: ServedRun) -> None:
    run = server.log.parent / server.name
    given = "\n".join(json.dumps({"question": each}) for each in PROBLEMS)
    command = [
        *serve_command(run)[:3],
        "generate",
        str(run),
        "--checkpoint",
        "0",
        "--set",
        "launch.scorers=1",
    ]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    generated = [json.loads(line)["completion"] for line in done.stdout.splitlines()]
    with server.client() as client:
        answers = client.completions.create(model=server.name, prompt=PROBLEMS)
    assert [each.text for each in answers.choices] == generated


def test_connections_beyond_the_limit_cost_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 0)
    caplog.set_level(logging.WARNING)

    async def served() -> list[bytes]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            server = listening.server_of(Starlette(), 1.0)
            serving = asyncio.create_task(server.serve([listener]))
            heads = []
            for _ in range(200):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                heads.append((await reader.readline()).split()[1])
                writer.close()
            server.should_exit = True
            await serving
            return heads

    assert set(asyncio.run(served())) == {b"503"}
    assert 0 < caplog.text.count("Exceeded concurrency limit") < 150
