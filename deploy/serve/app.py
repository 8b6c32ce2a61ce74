"""The routes: admission of requests, their deadlines, and the end of requests whose client has disconnected."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from prefixrl.deploy.serve.answering import Answering
from prefixrl.deploy.serve.api_request import ApiError, ApiRequest, Limits, read
from prefixrl.deploy.serve.listening import refusal
from prefixrl.deploy.serve.openai_format import AnswerPart, Format, TokenCounts, event_of

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 2**20
BODY_S = 20.0
"""Longest time for a body to arrive."""
JSON = "application/json"
ROUTES = "GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions"
Handler = Callable[[Request, Send], Awaitable[Response | None]]
"""Returns the response, or sends it itself and returns None."""


@dataclass(frozen=True)
class Policy:
    """The limits of the server."""

    key: str | None
    """None: every client that reaches the loopback address may send requests."""
    most_rows: int
    """Largest number of answers that wait or are being written, over all clients."""
    deadline_s: float
    """Longest time for one request."""


class ClientGone(Exception):
    """The client has closed its connection."""


class CompletionService:
    """The state of the server: its models, its limits and the number of open answers."""

    def __init__(self, answering: Answering, limits: Limits, policy: Policy) -> None:
        self._answering = answering
        self._limits = limits
        self._policy = policy
        self._started_s = int(time.time())
        self.open_rows = 0
        """Number of answers that wait or are being written."""

    def app(self) -> Starlette:
        """Return the application."""
        key = self._policy.key
        routes = [
            Route("/health", _Endpoint(self._health, key, needs_key=False), methods=["GET"]),
            Route("/v1/models", _Endpoint(self._models, key), methods=["GET"]),
            Route("/v1/models/{name:path}", _Endpoint(self._models, key), methods=["GET"]),
            Route("/v1/completions", _Endpoint(self._answered, key), methods=["POST"]),
            Route("/v1/chat/completions", _Endpoint(self._answered, key), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})

    async def _health(self, _request: Request, _send: Send) -> Response:
        engines = [model.engine for model in self._answering.models]
        is_well = all(engine.fault is None for engine in engines)
        document = {
            "status": "ok" if is_well else "failed",
            "open_answers": self.open_rows,
            "engine_rows": {engine.name: engine.rows for engine in engines},
        }
        return _response(document, 200 if is_well else 503)

    async def _models(self, request: Request, _send: Send) -> Response:
        name = request.path_params.get("name")
        if name not in (None, self._limits.model):
            raise ApiError(
                404, f"there is no model {name!r}; /v1/models lists the one there is", "model"
            )
        model = {
            "id": self._limits.model,
            "object": "model",
            "created": self._started_s,
            "owned_by": "prefixrl",
        }
        return _response({"object": "list", "data": [model]} if name is None else model)

    async def _answered(self, request: Request, send: Send) -> None:
        is_chat = request.url.path.endswith("/chat/completions")
        api_request = read(await _body(request), self._limits, is_chat)
        deadline_s = self._policy.deadline_s
        with self._admitted(self._answering.rows(api_request)):
            try:
                async with asyncio.timeout(deadline_s):
                    await _unless_gone(request.receive, self._answer(api_request, request, send))
            except TimeoutError:
                remedy = "(prefixrl serve --deadline); ask for fewer tokens or answers"
                raise ApiError(
                    504, f"no whole answer within {deadline_s:g} s {remedy}", code="deadline"
                ) from None

    @contextlib.contextmanager
    def _admitted(self, rows: int) -> Iterator[None]:
        most = self._policy.most_rows
        if rows > most:
            raise ApiError(
                400, f"{rows} answers in one request: allowed are {most}; send several", "n"
            )
        if self.open_rows + rows > most:
            said = f"{self.open_rows} answers are open, {most} at most (prefixrl serve --most-answers); ask again later"
            raise ApiError(429, said, code="queue_full")
        self.open_rows += rows
        try:
            yield
        finally:
            self.open_rows -= rows

    async def _answer(self, api_request: ApiRequest, request: Request, send: Send) -> None:
        """Send the answer to one request, as a whole or as a stream."""
        form = Format(
            self._limits.model, api_request.is_chat, api_request.stream_options.include_usage
        )
        prompts = await self._answering.prompts(api_request)
        usage = TokenCounts(sum(map(self._answering.prompt_tokens, prompts)))
        parts = list[AnswerPart]()
        choices = len(prompts) * api_request.n

        async def stream(body: bytes, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})

        async def emit(part: AnswerPart) -> None:
            usage.completion_tokens += part.tokens
            if not api_request.stream:
                parts.append(part)
            elif event := form.event(part):
                await stream(event)

        # Once the status is sent, a fault can only be an event of the stream.
        if api_request.stream:
            content_type = (b"content-type", b"text/event-stream; charset=utf-8")
            headers = [content_type, (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await stream(form.opening(choices))
        try:
            await self._answering.answer(api_request, prompts, emit)
        except ApiError:
            raise
        except Exception as error:
            log.exception("an engine failed")
            raise ApiError(
                500, f"the engine failed ({type(error).__name__}); see the server's log"
            ) from error
        if api_request.stream:
            await stream(form.ending(usage), is_last=True)
        else:
            response = _response(form.whole(parts, choices, usage))
            await response(request.scope, request.receive, send)


class _Endpoint:
    """A route as an ASGI application: it checks Host and key, and reports errors in OpenAI's form."""

    def __init__(self, answer: Handler, key: str | None, needs_key: bool = True) -> None:
        self._answer = answer
        self._key = key
        self._needs_key = needs_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun |= message["type"] == "http.response.start"
            await send(message)

        request = Request(scope, receive)
        try:
            host = request.url.hostname or ""
            authorization = request.headers.get("authorization")
            if refused := refusal(host, authorization, self._key, self._needs_key):
                raise ApiError(*refused, code="invalid_api_key" if refused[0] == 401 else None)
            response = await self._answer(request, noted)
        except (ClientGone, ClientDisconnect):
            log.info("a client left before its answer was whole")
            return
        except ApiError as error:
            if has_begun:
                # No [DONE]: the client must see that this is not the whole.
                await send({"type": "http.response.body", "body": event_of(error.document)})
                return
            response = _response(error.document, error.status, error.headers)
        if response is not None:
            await response(scope, receive, send)


def _response(
    document: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(document), status, headers, JSON)


async def _unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work; cancel it and raise ClientGone when the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0] not in finished:
        raise ClientGone
    tasks[0].result()


async def _body(request: Request) -> bytes:
    """Return the body; raise ApiError for a body of another type, or one that is too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        # A web page can send other types to loopback without asking its browser's leave.
        raise ApiError(415, f"content-type = {kind!r}: allowed is {JSON!r}; send JSON")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(
                        413,
                        f"the body is larger than {MOST_BODY_BYTES} bytes; send fewer problems at once",
                    )
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_S:g} s; send it at once"
        ) from None
    return bytes(body)


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refused = ApiError(status, f"{request.method} {request.url.path}: this server has {ROUTES}")
    return _response(refused.document, status)
