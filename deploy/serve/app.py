"""The routes: admission, deadlines, and the end of requests whose client has gone."""

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prefixrl.deploy.serve.answering import Answering
from prefixrl.deploy.serve.api_request import ApiError, Asked, Limits, read
from prefixrl.deploy.serve.openai_format import AnswerPart, Format, TokenCounts, event_of, models

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 2**20
BODY_S = 20.0
"""Longest time for a body to arrive."""
RETRY_S = 1
JSON = "application/json"


@dataclass(frozen=True)
class Policy:
    """The limits of the server."""

    key: str | None
    """None: everybody who reaches the loopback address may ask."""
    most_rows: int
    """Most answers that wait or are written, of all clients."""
    deadline_s: float
    """Longest time for one request."""


class ClientGone(Exception):
    """The client has closed its connection."""


class CompletionService:
    """The server's state: models, limits, open answers."""

    def __init__(self, answering: Answering, limits: Limits, policy: Policy) -> None:
        self._answering, self._limits, self._policy = answering, limits, policy
        self._started_s = int(time.time())
        self.open_rows = 0
        """Number of answers that wait or are written."""

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/health", self._guarded(self._health, needs_key=False), methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._models), methods=["GET"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})

    def _guarded(self, answer: Callable[[Request, Send], Awaitable[None]], needs_key: bool = True) -> "_Endpoint":
        def check(request: Request) -> None:
            _check_host(request, self._policy.key)
            if needs_key:
                _check_key(request, self._policy.key)

        return _Endpoint(check, answer)

    async def _health(self, request: Request, send: Send) -> None:
        engines = {model.engine.name: model.engine for model in self._answering.models}
        is_well = all(engine.fault is None for engine in engines.values())
        document = {
            "status": "ok" if is_well else "failed",
            "open_answers": self.open_rows,
            "engine_rows": {name: engine.rows for name, engine in engines.items()},
        }
        await _send(request, send, msgspec.json.encode(document), 200 if is_well else 503)

    async def _models(self, request: Request, send: Send) -> None:
        name = request.path_params.get("name")
        if name not in (None, self._limits.model):
            raise ApiError(404, f"there is no model {name!r}; /v1/models lists the one there is", "model")
        document = msgspec.json.decode(models(self._limits.model, self._started_s))
        await _send(request, send, msgspec.json.encode(document if name is None else document["data"][0]))

    async def _completions(self, request: Request, send: Send) -> None:
        await self._asked(request, send, is_chat=False)

    async def _chat(self, request: Request, send: Send) -> None:
        await self._asked(request, send, is_chat=True)

    async def _asked(self, request: Request, send: Send, is_chat: bool) -> None:
        asked = read(await _body(request), self._limits, is_chat)
        with self._admitted(len(asked.problems) * asked.choices):
            answer = _Reply(self._answering, asked, self._limits.model, request, send)
            try:
                async with asyncio.timeout(self._policy.deadline_s):
                    await _unless_gone(request.receive, answer.give())
            except TimeoutError:
                raise ApiError(
                    504,
                    f"no whole answer within {self._policy.deadline_s:g} s (prefixrl serve --deadline); ask for fewer "
                    f"tokens or answers",
                    code="deadline",
                ) from None

    @contextlib.contextmanager
    def _admitted(self, rows: int) -> Any:
        most = self._policy.most_rows
        if rows > most:
            raise ApiError(400, f"{rows} answers in one request: allowed are {most}; send several", "n")
        if self.open_rows + rows > most:
            raise ApiError(
                429,
                f"{self.open_rows} answers are open, {most} at most (prefixrl serve --most-answers); ask again later",
                code="queue_full",
                retry_s=RETRY_S,
            )
        self.open_rows += rows
        try:
            yield
        finally:
            self.open_rows -= rows


class _Endpoint:
    """A route as an application: it answers errors in OpenAI's form."""

    def __init__(self, check: Callable[[Request], None], answer: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._check, self._answer = check, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Any) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            self._check(request)
            await self._answer(request, noted)
        except (ClientGone, ClientDisconnect):
            log.info("a client left before its answer was whole")
        except ApiError as error:
            if not has_begun:
                await Response(msgspec.json.encode(error.document), error.status, error.headers, JSON)(
                    scope, receive, send
                )
            else:
                # No [DONE]: the client must see that this is not the whole.
                await send({"type": "http.response.body", "body": event_of(error.document)})


class _Reply:
    """The answer to one request, as a whole or as a stream."""

    def __init__(self, answering: Answering, asked: Asked, model: str, request: Request, send: Send) -> None:
        self._answering, self._asked, self._request, self._send = answering, asked, request, send
        self._format = Format(model, asked.is_chat, asked.includes_usage)

    async def give(self) -> None:
        asked = self._asked
        prompts = await self._answering.prompts(asked)
        usage, deltas = TokenCounts(sum(each.tokens for each in prompts)), list[AnswerPart]()

        async def emit(delta: AnswerPart) -> None:
            usage.completion_tokens += delta.tokens
            if not asked.streams:
                deltas.append(delta)
            elif event := self._format.event(delta):
                await self._part(event)

        choices = len(prompts) * asked.choices
        if asked.streams:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._part(self._format.opening(choices))
        try:
            await self._answering.answer(asked, prompts, emit)
        except ApiError:
            raise
        except Exception as error:
            log.exception("an engine failed")
            raise ApiError(500, f"the engine failed ({type(error).__name__}); see the server's log") from error
        if asked.streams:
            await self._send({"type": "http.response.body", "body": self._format.ending(usage)})
        else:
            await _send(self._request, self._send, self._format.whole(deltas, choices, usage))

    async def _part(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _send(request: Request, send: Send, body: bytes, status: int = 200) -> None:
    await Response(body, status, media_type=JSON)(request.scope, request.receive, send)


async def _unless_gone(receive: Receive, work: Any) -> None:
    """Do the work, and give it up when the client has gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0] not in done:
        raise ClientGone
    tasks[0].result()


async def _body(request: Request) -> bytes:
    """Return the body; raises ApiError for one that is none, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        # A web page can send other types to loopback without asking its browser's leave.
        raise ApiError(415, f"content-type = {kind!r}: allowed is {JSON!r}; send JSON")
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > MOST_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes; send fewer problems at once")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s; send it at once") from None
    return bytes(found)


def _check_key(request: Request, key: str | None) -> None:
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not compare_digest(given.strip().encode(), key.encode()):
        raise ApiError(
            401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
        )


def _check_host(request: Request, key: str | None) -> None:
    """Refuse names of other hosts where no key is asked for.

    A web page may have its own name point to loopback.
    """
    if key is None and not is_loopback(request.url.hostname or ""):
        raise ApiError(
            403, f"Host {request.url.hostname!r}: without a key only localhost, 127.0.0.1 and ::1 are; use one of them"
        )


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    found = ApiError(
        status,
        f"{request.method} {request.url.path}: this server has GET /health, GET /v1/models, POST /v1/completions, "
        f"POST /v1/chat/completions",
    )
    return Response(msgspec.json.encode(found.document), status, media_type=JSON)
