"""The text of the probe: what the first adapter itself answers to questions of the training data.

Of random tokens a model would be off by most of its noise and least of what it learns.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.interface.adapter import PROBE_ROOM_TOKENS
from prefixrl.common.engines.interface.base import Job, TokenIds
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.packing import ProbeRow

log = logging.getLogger(__name__)

POSITIONS = 1024
"""Scored tokens: the error of a slope falls with the root of their number."""
SCORED_TOKENS = 256
"""Most scored tokens of a row; fewer where the context is short. Each row costs its prompt, too: so few, long ones."""


def room_tokens(config: RunConfig, most_positions: int) -> int:
    """Return the tokens of a row that every engine of a run has context for, and one to come."""
    rollout = config.rollout
    room = max(rollout.max_prompt_tokens + config.max_sampled_tokens, PROBE_ROOM_TOKENS)
    context = rollout.record.context_tokens(rollout) or room
    return min(room, most_positions, context) - 1


def prompts(config: RunConfig, questions: Sequence[str], folder: str, rows: int) -> list[TokenIds]:
    """Render as many questions as the probe has rows; questions that are too long are left out."""
    renderer = Renderer(folder, config.rollout.max_prompt_tokens)
    rendered: list[TokenIds] = []
    for question in questions:
        if len(rendered) == rows:
            break
        try:
            rendered.append(renderer.prompt(question))
        except ValueError as error:
            log.debug("left out of the probe: %s", error)
    return rendered


def make_probe(
    config: RunConfig, questions: Sequence[str], folder: str, device: torch.device
) -> list[ProbeRow]:
    """Return rows of at least `POSITIONS` scored tokens, drawn by the initial adapter: the same on every rank."""
    engine = TransformersEngine(folder, str(device), config.learner.dtype, config.learner.threads)
    room = room_tokens(config, engine.most_positions)
    scored = min(SCORED_TOKENS, room // 2)
    rows = math.ceil(POSITIONS / scored)
    starts = prompts(config, questions, folder, rows) or [np.zeros(1, dtype=np.int32)]
    # The end of a long prompt is kept. Few prompts are asked several times, with other draws.
    prefixes = [starts[row % len(starts)][scored - room :] for row in range(rows)]
    draws = np.random.Generator(np.random.PCG64(derive(config.seed, "probe"))).random(
        (rows, scored)
    )
    engine.submit(
        Job(
            "probe",
            tuple(prefixes),
            draws,
            Sampling(temperature=1.0, max_new_tokens=scored),
            frozenset(),
        )
    )
    while not (results := engine.step(0.0)):
        pass
    # Training needs the memory of the device: this copy of the adapter goes at once.
    del engine
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [(each, row.tokens) for each, row in zip(prefixes, results[0].rows, strict=True)]
