"""`prefixrl dashboard`: all runs of a folder in a browser, from their files and brokers; it writes nothing.

    browser ── page, list, then events ──▶ dashboard.py ── one feed per viewed run ──▶ feed.py

The page is the one of report.html (runs/page). A run is found by its name in the list of the folder, never by a path.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path

import click
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.host.process import allow_many_files
from prefixrl.common.run.directory_format import FORMAT_FILE
from prefixrl.common.worker.command import PATH
from prefixrl.deploy.runs.report_page import FOLDER
from prefixrl.deploy.serve.listening import address_of, key_of, listening, refusal, server_of
from prefixrl.deploy.view.feed import TICK_S, Feed, SentParts, state_now
from prefixrl.deploy.view.run_state import log_tail, runs_below

LOG_LINES, MOST_RUNS = 40, 16
HEADERS: dict[str, str] = msgspec.json.decode((FOLDER / "headers.json").read_bytes())
"""Headers of every answer: only the page's own scripts run, and nobody else may hold it in a frame."""


@click.command("dashboard")
@click.argument("folder", default="runs", type=PATH)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; others need a key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7788,
    show_default=True,
    help="0: any free one.",
)
@click.option(
    "--key-variable",
    metavar="NAME",
    help="Environment variable with the key, which is the password.",
)
@click.option("--key-file", type=PATH, help="File with the key, mode 0600.")
def dashboard_command(
    folder: Path, host: str, port: int, key_variable: str | None, key_file: Path | None
) -> None:
    """Show the runs in FOLDER (default: runs), or the one run that it is, in a browser; write nothing."""
    key = key_of(host, key_variable, key_file)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give a run directory, or a folder with some")
    allow_many_files()
    with listening(host, port) as listener:
        click.echo(f"dashboard of {folder}: {address_of(listener)}/ (Ctrl-C ends it)", err=True)
        dashboard = Dashboard(folder, key)
        server = server_of(dashboard.app(), 2 * TICK_S)
        dashboard.is_over = lambda: server.should_exit
        server.run(sockets=[listener])


class Dashboard:
    """The runs of a folder, and the feeds of those that were viewed."""

    def __init__(self, folder: Path, key: str | None) -> None:
        self._folder = folder.resolve()
        self._key = key
        self._feeds: dict[str, Feed] = {}
        self.is_over = lambda: False

    def app(self) -> Starlette:
        """Return the application."""
        parts = {"/api/runs": self._list, "/api/follow": self._follow, "/api/logs": self._logs}
        routes = [
            *(Route(*each) for each in parts.items()),
            Mount("/", StaticFiles(directory=FOLDER, html=True)),
        ]
        return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, self._guarded)])

    async def _guarded(self, request: Request, answer: RequestResponseEndpoint) -> Response:
        """Let in who may ask, and name in every answer what a browser may do with it."""
        authorization = request.headers.get("authorization")
        if refused := refusal(request.url.hostname or "", authorization, self._key):
            status, reason = refused
            response: Response = PlainTextResponse(reason, status)
            if status == HTTPStatus.UNAUTHORIZED:
                response.headers["www-authenticate"] = 'Basic realm="prefixrl, any user name"'
        else:
            response = await answer(request)
        response.headers.update(HEADERS)
        return response

    def _runs(self) -> dict[str, Path]:
        """Return the runs that are there now, by name."""
        if (self._folder / FORMAT_FILE).exists():
            return {self._folder.name: self._folder}
        try:
            return {str(run.relative_to(self._folder)): run for run in runs_below(self._folder)}
        except ConfigError:
            return {}  # the first one is still to come

    async def _list(self, request: Request) -> Response:
        return JSONResponse(
            {"folder": str(self._folder), "runs": await asyncio.to_thread(self._states)}
        )

    def _states(self) -> list[object]:
        states: list[object] = []
        for name, run in self._runs().items():
            try:
                states.append({**msgspec.to_builtins(state_now(run)), "name": name})
            except (UserError, OSError) as error:
                states.append(
                    {"name": name, "state": "unreadable", "reason": str(error), "accuracy": {}}
                )
        return states

    async def _follow(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        runs = self._runs()
        if not 0 < len(set(names)) <= MOST_RUNS or not set(names) <= runs.keys():
            return PlainTextResponse(
                f"give run=NAME, at most {MOST_RUNS} of those in /api/runs", 404
            )
        feeds = {name: self._feeds.setdefault(name, Feed(runs[name])) for name in names}
        return StreamingResponse(_events(feeds, self.is_over), media_type="text/event-stream")

    async def _logs(self, request: Request) -> Response:
        if (run := self._runs().get(request.query_params.get("run", ""))) is None:
            return PlainTextResponse("give run=NAME, one of those in /api/runs", 404)
        logs = sorted((run / "logs").glob("*.log"))
        return JSONResponse(
            {path.stem: await asyncio.to_thread(log_tail, path, LOG_LINES) for path in logs}
        )


async def _events(feeds: dict[str, Feed], is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield what the feeds tell one viewer, until he leaves or the server ends."""
    sent = dict.fromkeys(feeds, SentParts())
    for feed in feeds.values():
        feed.viewers += 1
    try:
        while not is_over():
            message: dict[str, object] = {}
            for name, feed in feeds.items():
                parts, sent[name] = await feed.since(sent[name])
                message |= {name: parts} if parts else {}
            if message:
                yield b"data: %b\n\n" % msgspec.json.encode(message)
            await asyncio.sleep(TICK_S)
    finally:
        for feed in feeds.values():
            feed.leave()
