"""`prefixrl serve`: loads the models of a run, listens, and ends in order."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch
from transformers.utils.logging import disable_progress_bar

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError, PrefixRLError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import AskedToStop, StopSignals, allow_many_files, start_logging
from prefixrl.common.prompts.asking import log_warnings
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.deploy.runs.checkpoints import LATEST, config_of, weights_of
from prefixrl.deploy.serve.answering import Answering, Model
from prefixrl.deploy.serve.api_request import Limits
from prefixrl.deploy.serve.app import CompletionService, Policy
from prefixrl.deploy.serve.engine_thread import EngineThread
from prefixrl.deploy.serve.listening import key_of, listen, server_of

log = logging.getLogger(__name__)

ADAPTER_SHARE, TARGET_SHARE = 0.2, 0.7
"""Shares of a GPU's memory where vLLM holds both models and the run names none."""


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
    with listen(options.host, options.port) as socket:
        try:
            with StopSignals().ending_at_once():
                models = _loaded(config, weights.model)
        except AskedToStop:
            return 0
        answering = Answering(config, models[0], models[1] if len(models) > 1 else None, options.suffix)
        name = options.name or options.run.resolve().name
        own = config.adapter.system is not None, config.target is not None and config.target.system is not None
        limits = Limits(
            name, answering.most_tokens, "adapter.system" if own[0] else "target.system" if own[1] else None
        )
        policy = Policy(key, options.most_answers, options.deadline)
        server = server_of(CompletionService(answering, limits, policy).app(), options.deadline)
        for model in models:
            model.engine.on_fault = lambda: setattr(server, "should_exit", True)
            server.should_exit |= model.engine.fault is not None
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"{name}, {weights.version} iterations: http://{shown}:{port}/v1", err=True)
        server.run(sockets=[socket])
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


def _servable(config: RunConfig) -> RunConfig:
    """Return the config whose models can be loaded here; raises ConfigError for other engines."""
    roles = ("rollout", "scorer") if config.mode == "prefix" else ("rollout",)
    for role in roles:
        engine = (config.rollout if role == "rollout" else config.scorer).engine
        if engine in ("openai", "simulated"):
            raise ConfigError(
                f'{role}.engine = "{engine}": `prefixrl serve` loads the models itself; allowed are auto, vllm and '
                f"transformers; give --set {role}.engine=transformers"
            )
    if config.mode == "direct" or not torch.cuda.is_available():
        return config
    shares = {"rollout": ADAPTER_SHARE, "scorer": TARGET_SHARE}
    sections = {role: getattr(config, role) for role in roles}
    if any(each.vllm.gpu_memory_utilization is not None for each in sections.values()):
        return config
    changed = {
        role: each.model_copy(update={"vllm": each.vllm.model_copy(update={"gpu_memory_utilization": shares[role]})})
        for role, each in sections.items()
    }
    return config.model_copy(update=changed)


def _loaded(config: RunConfig, adapter: str) -> list[Model]:
    """Load the adapter, and in prefix mode the target."""
    models = [_model("adapter", "rollout", config.rollout.engine, model_folder(adapter), config)]
    if config.target is not None:
        folder = model_folder(config.target.model)
        models.append(_model("target", "scorer", config.scorer.engine, folder, config))
    return models


def _model(name: str, role: Literal["rollout", "scorer"], kind: str, folder: str, config: RunConfig) -> Model:
    renderer = renderer_of(config, role, folder)
    log_warnings(config, role, renderer)
    engine = make_engine(kind, folder, role, config)
    log.info("%s by %s: %s", name, engine.name, folder)
    return Model(EngineThread(engine, name), renderer)
