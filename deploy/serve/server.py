"""`prefixrl serve`: loads the models of a run, listens, and ends in order."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch
from transformers.utils.logging import disable_progress_bar

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engine_record import AUTO
from prefixrl.common.config.workers.engines import ENGINES
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError, PrefixRLError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.process import AskedToStop, StopSignals, allow_many_files, start_logging
from prefixrl.common.prompts.asking import log_warnings
from prefixrl.common.prompts.rendering import texts_of
from prefixrl.deploy.runs.checkpoints import config_of, served_checkpoint, weights_of
from prefixrl.deploy.serve.answering import Answering, BestOf, Model
from prefixrl.deploy.serve.api_request import Limits
from prefixrl.deploy.serve.app import CompletionService, Policy
from prefixrl.deploy.serve.choosing import load_chooser
from prefixrl.deploy.serve.engine_thread import PIECE_TOKENS, EngineThread
from prefixrl.deploy.serve.listening import address_of, key_of, listening, server_of

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
    prefix_only: bool
    best_of: int
    settings: tuple[str, ...]


def serve(options: ServeOptions) -> int:
    """Serve until a stop signal; return the exit code."""
    if options.prefix_only and options.best_of > 1:
        raise ConfigError(
            "--best-of chooses among whole answers, but --prefix-only writes none: leave one out"
        )
    if options.best_of > options.most_answers:
        raise ConfigError(
            f"--best-of {options.best_of}: a request would take more answers than --most-answers "
            f"{options.most_answers} lets be open; raise that, or choose among fewer"
        )
    key = key_of(options.host, options.key_variable, options.key_file)
    config = _servable(config_of(options.run, options.settings), options.prefix_only)
    checkpoint = options.checkpoint or served_checkpoint(options.run)
    weights = weights_of(options.run, config, checkpoint, options.is_averaged)
    start_logging("prefixrl-serve")
    disable_progress_bar()
    allow_many_files()
    with listening(options.host, options.port) as listener:
        try:
            with StopSignals().ending_at_once():
                best_of = None
                if options.best_of > 1:
                    best_of = BestOf(options.best_of, load_chooser(config))
                target = None
                if config.target is not None and not options.prefix_only:
                    # First: an endpoint that refuses to answer does so at once.
                    target = _loaded(config, "scorer", _target_folder(config))
                adapter = _loaded(config, "rollout", model_folder(weights.model))
        except AskedToStop:
            return 0
        answering = Answering(config, adapter, target, options.suffix, best_of)
        models = answering.models
        name = options.name or options.run.resolve().name
        sections = {"adapter": config.adapter, "target": config.target}
        systems = (
            f"{role}.system"
            for role, model in sections.items()
            if model and model.system is not None
        )
        limits = Limits(
            name, answering.most_tokens, next(systems, None), samples_by_default=best_of is not None
        )
        policy = Policy(key, options.most_answers, options.deadline)
        server = server_of(CompletionService(answering, limits, policy).app(), options.deadline)
        for model in models:
            # An engine may have failed before it had this callback, so its fault is looked at too.
            model.engine.on_fault = lambda: setattr(server, "should_exit", True)
            server.should_exit |= model.engine.fault is not None
        click.echo(f"{name}, {weights.version} iterations: {address_of(listener)}/v1", err=True)
        server.run(sockets=[listener])
    return _ended(models)


def _ended(models: list[Model]) -> int:
    """Stop the engines; raise the error of one that failed."""
    fault = next(filter(None, (model.engine.fault for model in models)), None)
    for model in models:
        model.engine.close()
    if isinstance(fault, PrefixRLError):
        raise fault
    if fault:
        log.error("an engine failed", exc_info=fault)
        return 1
    click.echo("stopped", err=True)
    return 0


def _servable(config: RunConfig, prefix_only: bool) -> RunConfig:
    """Return a config whose models can be served here; raise ConfigError for an engine without a model."""
    has_target = config.mode == "prefix" and not prefix_only
    if prefix_only and config.adapter.sees_draft:
        raise ConfigError(
            "--prefix-only: the adapter of this run reads a draft of the target (adapter.sees), which has to be asked "
            "first; leave --prefix-only out"
        )
    roles = ("rollout", "scorer") if has_target else ("rollout",)
    sections = {role: getattr(config, role) for role in roles}
    for role, section in sections.items():
        if not (section.record.holds_weights or section.record.needs_address):
            loadable = [name for name, record in ENGINES.items() if record.holds_weights]
            raise ConfigError(
                f'{role}.engine = "{section.engine}" has no model that `prefixrl serve` could ask; allowed are '
                f"{AUTO}, {', '.join(loadable)}; give --set {role}.engine=transformers"
            )
    sized = {role: section for role, section in sections.items() if section.record.memory}
    has_share = any(section.record.memory.share(section) is not None for section in sized.values())
    if not has_target or has_share or not torch.cuda.is_available():
        return config
    # Both engines are on one GPU, where each would take most of the memory for itself.
    shares = {"rollout": ADAPTER_SHARE, "scorer": TARGET_SHARE}
    changed = {
        role: section.record.memory.with_share(section, shares[role], None)
        for role, section in sized.items()
    }
    return config.model_copy(update=changed)


def _target_folder(config: RunConfig) -> str:
    """Return the folder of the target's files; the target's name where nothing of it is read here."""
    assert config.target is not None
    if not config.scorer.has_tokenizer:
        return config.target.model
    return model_folder(config.target.model, needs_weights=config.scorer.record.holds_weights)


def _loaded(config: RunConfig, role: Literal["rollout", "scorer"], folder: str) -> Model:
    section = config.engine_section(role)
    renderer = texts_of(config, role, folder)
    log_warnings(config, role, renderer)
    engine = make_engine(section.engine, folder, role, config)
    name = "adapter" if role == "rollout" else "target"
    log.info("%s by %s: %s", name, engine.name, folder)
    # A row of an endpoint is one request.
    piece_tokens = PIECE_TOKENS if section.record.holds_weights else sys.maxsize
    return Model(EngineThread(engine, name, piece_tokens=piece_tokens), renderer)
