"""A completions endpoint with real sockets that answers exactly as the test chooses."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.scorer.served.engine import OpenAIEngine
from support.paths import EXAMPLE

MODEL = "served-target"
TARGET = EXAMPLE / "target"
END = 1
"""The arithmetic target's own end-of-turn token."""


@dataclass
class Reply:
    """An answer of the server; `content` of type bytes is sent unchanged."""

    status: int = 200
    content: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    drops: bool = False
    """Close the connection instead."""
    after_s: float = 0.0


@dataclass
class Request:
    """A request to the server."""

    path: str
    body: dict[str, Any]
    raw: bytes
    headers: dict[str, str]
    at_s: float


Script = Callable[[Request], Reply | None]
"""None: answer as a vLLM server would."""


def tokens_for(body: dict[str, Any]) -> list[int]:
    """Return the text of the fake model, which follows from prompt and seed."""
    start = sum(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"])
    start += body.get("seed", 0)
    return [2 + (start + index) % 30 for index in range(body["max_tokens"])]


def written(body: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """Return a completion as vLLM sends it."""
    tokens = tokens_for(body)
    result = {
        "index": 0,
        "text": "?",
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_token_ids": body["prompt"],
    } | choice
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
    return {"id": "c", "object": "text_completion", "choices": [result], "usage": usage}


def failure(message: str) -> dict[str, Any]:
    """Return an error as OpenAI sends it."""
    return {"error": {"message": message, "type": "x", "code": None}}


class CompletionsServer(ThreadingHTTPServer):
    """Serves one model under /v1; `script` may be changed while it runs."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script = script or (lambda request: None)
        self.models: Reply | Script = Reply(content={"data": [{"id": MODEL, "max_model_len": 128}]})
        self.asked: list[Request] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def rows(self) -> list[Request]:
        """Completions asked for after the trial at the start, which wants one token."""
        return [request for request in self.asked if request.path == "/v1/completions"][1:]

    def answer(self, request: Request) -> Reply:
        with self._lock:
            self.asked.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            chosen = self.models if request.path == "/v1/models" else self.script
            reply = chosen if isinstance(chosen, Reply) else chosen(request)
            reply = reply or Reply(content=written(request.body))
            time.sleep(reply.after_s)
            return reply
        finally:
            with self._lock:
                self._at_once -= 1

    def close(self) -> None:
        """Stop listening and drop every connection, as a killed process does; once is enough."""
        if not self._thread.is_alive():
            return
        self.shutdown()
        self.server_close()
        for connection in self._open:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of the test's business."""


class _Handler(BaseHTTPRequestHandler):
    server: CompletionsServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, raw: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(raw) if raw else {}
        reply = self.server.answer(Request(self.path, body, raw, headers, time.monotonic()))
        if reply.drops:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        content = reply.content
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(reply.status)
        for name, value in (reply.headers | {"content-length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@contextmanager
def serving(script: Script | None = None, port: int = 0) -> Iterator[CompletionsServer]:
    """A server that is gone afterwards."""
    with closing(CompletionsServer(script, port)) as server:
        yield server


def config(url: str, *settings: str, **openai: Any) -> RunConfig:
    """The example's run with its target at an address."""
    keys = [f"scorer.openai.{key}={value}" for key, value in openai.items()]
    return load(
        EXAMPLE / "run.toml",
        ("scorer.engine=openai", f"scorer.openai.url={url}", *keys, *settings),
    )


@contextmanager
def engine_of(server: CompletionsServer, *settings: str, **openai: Any) -> Iterator[OpenAIEngine]:
    run = config(server.url, *settings, **openai)
    with closing(OpenAIEngine(str(TARGET), run, lambda: None)) as engine:
        yield engine
