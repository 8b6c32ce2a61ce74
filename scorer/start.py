"""Loads what a scorer needs, after the broker's Welcome: only then it is known whether torch has to be imported."""

from typing import TYPE_CHECKING

import msgspec

from prefixrl.common import user_function
from prefixrl.common.digests import name_digest, scorer_digests
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.messages import ModelDigests
from prefixrl.common.worker import Joined
from prefixrl.scorer import sandbox
from prefixrl.scorer.verifier_pool import RewardFunction, VerifierPool

if TYPE_CHECKING:
    from prefixrl.scorer.direct import DirectScorer
    from prefixrl.scorer.loop import Scorer


def load(joined: Joined) -> "Scorer | DirectScorer":
    """A scorer known to the broker; raises DataError when a model, tokenizer or function is not to be had on this host."""
    digests = scorer_digests(joined.config, joined.model)
    verifier = _verifier(joined, digests)
    make = _direct if joined.config.mode == "direct" else _with_target
    scorer = make(joined, verifier, digests)
    scorer.say_ready()
    return scorer


def _direct(joined: Joined, verifier: VerifierPool, digests: ModelDigests) -> "DirectScorer":
    from prefixrl.scorer.decoder import Decoder
    from prefixrl.scorer.direct import DirectScorer

    return DirectScorer(joined.config, joined.link, Decoder(joined.model), verifier, digests)


def _with_target(joined: Joined, verifier: VerifierPool, digests: ModelDigests) -> "Scorer":
    from prefixrl.common.engine import make_engine
    from prefixrl.common.engine_openai import OpenAIEngine
    from prefixrl.common.rendering import ByteRenderer, Renderer
    from prefixrl.scorer.loop import Scorer

    config = joined.config
    if config.scorer.engine == "openai":
        joined.link.vitals.state = f"waiting for {config.scorer.openai.url}"
    engine = make_engine(config.scorer.engine, joined.model, "scorer", config, joined.watch)
    if isinstance(engine, OpenAIEngine):
        digests = msgspec.structs.replace(digests, model=name_digest(engine.served_model))
    simulated = engine.name == "simulated"
    renderer = (
        ByteRenderer() if simulated else Renderer(joined.model, config.scorer.max_prompt_tokens)
    )
    return Scorer(config, joined.link, engine, renderer, verifier, digests)


def _verifier(joined: Joined, digests: ModelDigests) -> VerifierPool:
    section, place = joined.config.scorer, joined.config.reward.function
    function = None
    if place is not None:
        path = user_function.file_of(place)
        if not path.is_file():
            raise DataError(
                f"reward.function: there is no file {path} on this host; copy the learner's there"
            )
        function = RewardFunction(place, digests.reward_function)
    data = joined.config.data
    runs_programs = data.runs_programs and function is None
    if runs_programs and (reason := sandbox.probe()):
        raise ConfigError(
            f"data.code = {data.code!r}, or a problem set with coding tasks, needs programs to be isolated: {reason}; start "
            "scorers on hosts with user namespaces (docs/verification.md), or leave data.code and such problems out"
        )
    return VerifierPool(
        section.verifier_children, section.verify_timeout_s, function, runs_programs
    )
