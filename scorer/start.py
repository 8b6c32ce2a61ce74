"""Loading of a scorer after the broker's Welcome, which decides whether torch is imported."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.foreign.verifier import load_verifier
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.hub import model_folder
from prefixrl.common.host.start_line import start_line
from prefixrl.common.run.digests import name_digest, scorer_digests
from prefixrl.common.wire.messages.worker import ModelDigests
from prefixrl.common.worker.join import WorkerSession
from prefixrl.scorer.process.step_scoring import StepScoring, load_scoring
from prefixrl.scorer.sandbox import runner as sandbox
from prefixrl.scorer.verifier.exchange import Choices
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from prefixrl.scorer.verifier.pool_thread import JudgeThread, PoolThread

if TYPE_CHECKING:
    from prefixrl.scorer.direct import DirectScorer
    from prefixrl.scorer.loop import Scorer

log = logging.getLogger(__name__)


def load(session: WorkerSession) -> "Scorer | DirectScorer":
    """Return a scorer that the broker knows; raises DataError if a file is missing on this host."""
    prm = session.config.scorer.prm
    if prm is not None and Path(prm.model).is_absolute() and not Path(prm.model).is_dir():
        raise DataError(
            f"scorer.prm.model: there is no folder {prm.model} on this host; copy the learner's there"
        )
    folder = None if prm is None else model_folder(prm.model)
    digests = scorer_digests(session.config, session.model, folder)
    verifier = verifier_of(session.config, digests.reward_function)
    scoring = None if prm is None or folder is None else load_scoring(prm, folder)
    make = _direct if session.config.mode == "direct" else _with_target
    scorer = make(session, verifier, digests, scoring)
    ready = scorer.ready
    devices = {session.config.scorer.device, prm.device if prm else "cpu"}
    log.info(
        "loaded: %s",
        start_line("cpu" if devices == {"cpu"} else "cuda", f"{ready.engine} engine", ready.about),
    )
    scorer.say_ready()
    return scorer


def _direct(
    session: WorkerSession,
    verifier: JudgeThread,
    digests: ModelDigests,
    scoring: StepScoring | None = None,
) -> "DirectScorer":
    from prefixrl.scorer.direct import Decoder, DirectScorer

    return DirectScorer(
        session.config, session.link, Decoder(session.model), verifier, digests, scoring
    )


def _with_target(
    session: WorkerSession,
    verifier: JudgeThread,
    digests: ModelDigests,
    scoring: StepScoring | None,
) -> "Scorer":
    from prefixrl.common.engines.interface.base import Engine
    from prefixrl.common.engines.make import make_engine
    from prefixrl.common.prompts.asking import log_warnings
    from prefixrl.common.prompts.rendering import texts_of
    from prefixrl.scorer.loop import Scorer

    config = session.config
    engine: Engine
    if config.scorer.is_served:
        from prefixrl.common.worker.permits import Permits
        from prefixrl.scorer.served.load import load_served

        vitals = session.link.vitals
        vitals.activity = "waiting"
        vitals.state = f"waiting for {config.scorer.openai.url}"
        permits = session.link.permits = Permits(session.link.heartbeat_s)
        engine = load_served(session.model, "scorer", config, session.raise_if_hopeless, permits)
        # The broker compares the endpoint's name of its model: a run keeps one target.
        digests = msgspec.structs.replace(digests, model=name_digest(engine.served_model))
    else:
        engine = make_engine(config.scorer.engine, session.model, "scorer", config)
    renderer = texts_of(config, "scorer", session.model)
    log_warnings(config, "scorer", renderer)
    return Scorer(config, session.link, engine, renderer, verifier, digests, scoring)


def verifier_of(config: RunConfig, function_digest: str) -> JudgeThread:
    """Return the judge of answers; raises DataError or ConfigError for what this host lacks.

    `function_digest`: that of the file of `reward.function`, "" without one.
    """
    if config.reward.url is not None:
        from prefixrl.scorer.served.rewards import RewardServer

        return RewardServer(config.reward)
    section = config.scorer
    function_ref = config.reward.function
    function = None
    if function_ref is not None:
        path = user_function.file_of(function_ref)
        if not path.is_file():
            raise DataError(
                f"reward.function: there is no file {path} on this host; copy the learner's file there"
            )
        names = config.reward.environment
        if missing := [name for name in names if name not in os.environ]:
            raise ConfigError(
                f"reward.environment: {', '.join(missing)} is not set where this scorer was started"
            )
        function = RewardFunction(function_ref, function_digest, names, config.reward.weights)
    data = config.data
    for name in data.added_verifiers:
        load_verifier(name)  # a child would not say what is wrong with it
    choices = Choices(
        section.boxes == "sentence",
        data.float_tolerance,
        section.program_packages,
        data.added_verifiers,
    )
    # Found at the start: later every program would be an error of the sandbox.
    if function is None and data.runs_programs and (reason := sandbox.probe(choices.packages)):
        raise ConfigError(
            f"data.code = {data.code!r}, or a problem set with coding tasks, needs isolated programs: {reason}; start "
            f"scorers on hosts with user namespaces and the packages of scorer.program_packages "
            f"(docs/verification.md), or leave out data.code and such problems"
        )
    children = config.verifier_children(len(os.sched_getaffinity(0)))
    return PoolThread(lambda: VerifierPool(children, section.verify_timeout_s, function, choices))
