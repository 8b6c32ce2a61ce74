"""`prefixrl serve`: loads the models of a run, listens, and ends in order."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError, PrefixRLError, to_copy
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import AskedToStop, StopSignals, allow_many_files, handle_stops, start_logging
from prefixrl.common.prompts.asking import log_warnings
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.common.wire.address import is_loopback
from prefixrl.deploy.runs.checkpoints import LATEST, config_of, weights_of
from prefixrl.deploy.serve.answering import Answering, Model
from prefixrl.deploy.serve.api_request import Limits
from prefixrl.deploy.serve.app import CompletionService, Policy
from prefixrl.deploy.serve.engine_thread import EngineThread

log = logging.getLogger(__name__)

ADAPTER_SHARE, TARGET_SHARE = 0.2, 0.7
"""Shares of a GPU's memory where vLLM holds both models and the run names none."""
HEADER_S = 10.0
"""Longest time for the head of a request to arrive."""
KEEP_ALIVE_S = 30
MOST_CONNECTIONS = 2048
BACKLOG = 512
LEAST_KEY_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `prefixrl serve`."""

    run: Path
    checkpoint: str | None
    is_averaged: bool
    suffix: str
    host: str
    port: int
    name: str | None
    key_variable: str | None
    key_file: Path | None
    most_answers: int
    deadline: float
    settings: tuple[str, ...]


def serve(options: ServeOptions) -> int:
    """Serve until a stop signal; return the exit code."""
    key = key_of(options.host, options.key_variable, options.key_file)
    config = _servable(config_of(options.run, options.settings))
    weights = weights_of(options.run, config, options.checkpoint or LATEST, options.is_averaged)
    start_logging("prefixrl-serve")
    disable_progress_bar()
    allow_many_files()
    with _listening(options.host, options.port) as listener:
        try:
            with StopSignals().ending_at_once():
                models = [_loaded(config, "rollout", model_folder(weights.model))]
                if config.target is not None:
                    models.append(_loaded(config, "scorer", model_folder(config.target.model)))
        except AskedToStop:
            return 0
        answering = Answering(config, models[0], models[1] if len(models) > 1 else None, options.suffix)
        name = options.name or options.run.resolve().name
        sections = {"adapter": config.adapter, "target": config.target}
        systems = [f"{role}.system" for role, model in sections.items() if model and model.system is not None]
        limits = Limits(name, answering.most_tokens, systems[0] if systems else None)
        policy = Policy(key, options.most_answers, options.deadline)
        server = _server_of(CompletionService(answering, limits, policy), options.deadline)
        for model in models:
            model.engine.on_fault = lambda: setattr(server, "should_exit", True)
            server.should_exit |= model.engine.fault is not None
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"{name}, {weights.version} iterations: http://{shown}:{port}/v1", err=True)
        server.run(sockets=[listener])
    return _ended(models)


def _ended(models: list[Model]) -> int:
    """Stop the engines; raise the error of one that failed."""
    faults = [model.engine.fault for model in models if model.engine.fault is not None]
    for model in models:
        model.engine.close()
    for fault in faults:
        if isinstance(fault, PrefixRLError):
            raise fault
        log.error("an engine failed", exc_info=fault)
        return 1
    click.echo("stopped", err=True)
    return 0


# --- models ---------------------------------------------------------------------------------------------------------


def _servable(config: RunConfig) -> RunConfig:
    """Return the config whose models can be loaded here; raises ConfigError for other engines."""
    roles = ("rollout", "scorer") if config.mode == "prefix" else ("rollout",)
    sections = {role: getattr(config, role) for role in roles}
    for role, section in sections.items():
        if section.engine in ("openai", "simulated"):
            raise ConfigError(
                f'{role}.engine = "{section.engine}": `prefixrl serve` loads the models itself; allowed are auto, vllm '
                f"and transformers; give --set {role}.engine=transformers"
            )
    has_share = any(each.vllm.gpu_memory_utilization is not None for each in sections.values())
    if config.mode == "direct" or has_share or not torch.cuda.is_available():
        return config
    changed = {}
    for (role, section), share in zip(sections.items(), (ADAPTER_SHARE, TARGET_SHARE), strict=True):
        vllm = section.vllm.model_copy(update={"gpu_memory_utilization": share})
        changed[role] = section.model_copy(update={"vllm": vllm})
    return config.model_copy(update=changed)


def _loaded(config: RunConfig, role: Literal["rollout", "scorer"], folder: str) -> Model:
    renderer = renderer_of(config, role, folder)
    log_warnings(config, role, renderer)
    engine = make_engine(getattr(config, role).engine, folder, role, config)
    name = "adapter" if role == "rollout" else "target"
    log.info("%s by %s: %s", name, engine.name, folder)
    return Model(EngineThread(engine, name), renderer)


# --- key and socket -------------------------------------------------------------------------------------------------


def key_of(host: str, variable: str | None, file: Path | None) -> str | None:
    """Return the API key; raises ConfigError for an unfit one, or where one is missing."""
    if variable is not None and file is not None:
        raise ConfigError("--key-variable and --key-file: two sources of one key; give one")
    if file is not None:
        key, source = _read(file), f"--key-file {file}"
    elif variable is not None:
        # Processes of the engines need not have it.
        key, source = os.environ.pop(variable, ""), "--key-variable (the name is not shown: it may be the key itself)"
    elif is_loopback(host):
        return None
    else:
        raise ConfigError(
            f"--host {host}: other machines reach it, so that a key is needed; give --key-variable NAME or --key-file "
            f"FILE (mode 0600), or --host 127.0.0.1"
        )
    if len(key) < LEAST_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: holds no key of at least {LEAST_KEY_CHARS} printable ASCII characters without spaces; make one "
            f"with `openssl rand -hex 32`"
        )
    return key


def _read(file: Path) -> str:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"--key-file {file}: has mode {mode:04o}, others may read it; {to_copy('chmod 600', file)}"
            )
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file}: cannot be read ({error})") from None


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); give another, or --port 0"
        ) from None


class _Connection(H11Protocol):
    """A connection whose client must send a whole head in time: uvicorn has no limit for it."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADER_S, transport.close)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        is_waiting = self.cycle is None or self.cycle.response_complete
        if self._late and self.cycle is not before:
            self._late.cancel()
            self._late = None
        elif self._late is None and is_waiting:
            self._late = self.loop.call_later(HEADER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late:
            self._late.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server that any stop signal ends in order, with exit code 0: uvicorn raises the signal again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = handle_stops(self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _server_of(service: CompletionService, drain_s: float) -> _Server:
    """Return a server; once it is asked to stop, open requests have `drain_s` to end."""
    options: dict[str, Any] = {"loop": "asyncio", "http": _Connection, "ws": "none", "lifespan": "off"}
    options |= {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    return _Server(
        uvicorn.Config(
            service.app(),
            **options,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s),
        )
    )
