"""vLLM beside the learner on one device, as a function of it: logprobs, an installation in mid-answer, checksums."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.results import Figure
from benchmarks.snapshots import snapshot_of
from gpu.on_device import figure
from prefixrl.common.engines.interface.base import Continuation, Job, TokenIds
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.seeds import row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.learner.models.model import Models
from support.models import vllm_world as world
from support.models.tiny_model import run_config, whole

Tensors = dict[str, torch.Tensor]
SPREAD = 4.0
"""Standard deviation of the logits, as a trained model's."""


def two_versions(models: Models) -> list[Tensors]:
    """Weights as published, logits scaled, and 2 % more of all of them."""
    own, model = dict(models.actor.full_tensors()), models.actor.engine.module.model
    with torch.no_grad():
        logits = model(torch.arange(2, 60, device=models.device)[None]).logits
        model.get_output_embeddings().weight.mul_(SPREAD / logits.float().std())
        first = models.state_dict_for_publication()
        for tensor in own.values():
            tensor *= 1.02
        return [first, models.state_dict_for_publication()]


@torch.no_grad()
def hold(models: Models, tensors: Tensors) -> None:
    """Make the learner hold these weights."""
    for name, tensor in models.actor.full_tensors():
        if name.removeprefix("model.") in tensors:
            tensor.copy_(tensors[name.removeprefix("model.")])


def sampled(
    engine: VllmEngine, prompts: tuple[TokenIds, ...], tokens: int, later: Tensors | None
) -> tuple[Continuation, ...]:
    """The rows of a job; `later` is installed as version 2 after a third of its tokens."""
    begun, draws = engine.progress, row_uniforms(3, "prefix", len(prompts), tokens)
    engine.submit(
        Job("a", prompts, draws, Sampling(temperature=1.0, max_new_tokens=tokens), frozenset())
    )
    done = engine.step(0.01)
    while not done:
        if later is not None and engine.progress - begun > len(prompts) * tokens / 3:
            engine.install(snapshot_of(2, later))
            later = None
        done = engine.step(0.01)
    return done[0].rows


def gaps(
    models: Models, prompts: Sequence[TokenIds], rows: Sequence[Continuation], version: int
) -> NDArray[np.float32]:
    """|learner - vLLM| of every token that this version wrote."""
    results = []
    for prompt, row in zip(prompts, rows, strict=True):
        by = np.repeat([each for each, _ in row.spans], [size for _, size in row.spans])
        results.append(
            np.abs(models.probe_logprobs([(prompt, row.tokens)]) - row.logprobs)[by == version]
        )
    return np.concatenate(results)


def beside_the_learner(
    device: str, adapter: Path, dtype: str, rows: int, tokens: int
) -> list[Figure]:
    """Install two versions in a vLLM, the second in mid-answer, and hold what it samples against the learner's."""
    cache = {"kv_cache_memory_bytes": 4 * 2**30} if device == "cuda" else {}
    rollout = {
        "temperature": 1.0,
        "prefix_tokens": tokens,
        "max_prompt_tokens": 128,
        "device": device,
        "vllm": cache,
    }
    config = run_config(adapter, rollout=rollout, learner={"device": device, "dtype": dtype})
    models, random = Models.load(config, 0, 1, str(adapter)), np.random.default_rng(3)
    first, second = two_versions(models)
    texts = random.integers(2, models.hf_config.get_text_config().vocab_size, (rows, 64)).astype(
        np.int32
    )
    probe, prompts, begun_s = (
        [whole(text.tolist()) for text in texts[:8]],
        tuple(texts[:, :40]),
        time.monotonic(),
    )
    with world.started(adapter, run=config) as engine:
        times = {"start": time.monotonic() - begun_s}
        for name, each in (("first installation", second), ("second installation", first)):
            begun_s = time.monotonic()
            engine.install(snapshot_of(1, each))
            times[name] = time.monotonic() - begun_s
        scored, follows = engine.score(probe), engine.checksum().follows
        answers, speeds = [], []
        for later in (None, None, second):  # the first job compiles what is compiled late
            begun_s = time.monotonic()
            answers.append(sampled(engine, prompts, tokens, later))
            speeds.append(rows * tokens / (time.monotonic() - begun_s))
    hold(models, second)
    of_second, off = (
        gaps(models, prompts, answers[2], 2),
        np.abs(models.probe_logprobs(probe) - scored),
    )
    hold(models, first)
    results = {
        "a probe": np.abs(models.probe_logprobs(probe) - scored),
        "a probe, weights 2 % off": off,
        "sampled": gaps(models, prompts, answers[1], 1),
        "sampled before an installation": gaps(models, prompts, answers[2], 1),
        "sampled after it": of_second,
    }
    assert follows and all(len(row.spans) == 2 for row in answers[2])
    assert all(
        np.median(values) < 0.3 * np.median(off)
        for name, values in results.items()
        if values is not off
    ), results
    label = f"vLLM, {dtype}, {engine.about.split(',')[0]}"
    figures = [figure(f"{label}: {name}", "s", took_s) for name, took_s in times.items()]
    figures += [
        figure(f"{label}: sampling of {rows} rows{name}", "tokens/s", speed)
        for name, speed in zip(("", " with an installation"), speeds[1:], strict=True)
    ]
    return figures + [
        figure(
            f"{label}: |learner - vLLM|, {name}: {statistic.__name__}",
            "nat",
            float(statistic(values)),
        )
        for name, values in results.items()
        for statistic in (np.median, np.max)
    ]
