"""Behaviour logprobs against the learner's own, at one published version, from a folder with hostile defaults."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.learner.models.batch import Sample, pad
from prefixrl.learner.models.model import Models
from support.models import vllm_world as world
from support.models.engine_jobs import finish
from support.models.tiny_model import DEEPSPEED_WARNINGS
from support.models.vllm_world import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
    *DEEPSPEED_WARNINGS,
]

HOSTILE = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.9,
    "repetition_penalty": 9.0,
}
MASKED = [0, 2, 3, 4]
"""Special tokens of the example but its stop."""
TEMPERATURE = 2.0
"""The example's models are sure of themselves: at 1 most logprobs are 0 on either side."""
MOST = {"float32": (1e-5, 1e-3), "bfloat16": (0.03, 0.3)}
"""Mean and maximum of |difference| in nats: rounding, which in bf16 is 2^-8 of every logit on either side."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_logprobs_are_the_learners_at_the_same_version(
    dtype: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(EXAMPLE / "adapter", folder)
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE), encoding="utf-8")
    run = world.config()
    learner = run.learner.model_copy(update={"dtype": dtype})
    rollout = run.rollout.model_copy(update={"temperature": TEMPERATURE})
    run = run.model_copy(update={"learner": learner, "rollout": rollout})
    models = Models.load(run, 0, 1, str(folder))
    assert models.masked is not None and models.masked.nonzero()[:, 0].tolist() == MASKED
    move(models)
    with world.started(folder, run=run) as engine:
        engine.install(snapshot_of(1, models.state_dict_for_publication()))
        job = world.job("a", temperature=TEMPERATURE)
        job = replace(job, masked_tokens=frozenset(MASKED))
        rows = finish(engine, job)["a"].rows
    drawn = np.concatenate([row.tokens for row in rows])
    assert not np.isin(drawn, MASKED).any()
    batch = pad(
        [
            Sample(prompt, row.tokens, row.logprobs, 0.0, 0, np.ones(row.tokens.size, np.int32))
            for prompt, row in zip(job.rows, rows, strict=True)
        ],
        0,
    )
    with torch.no_grad():
        theirs = models.forward_actor(batch)[0]
        models.masked = None
        whole = models.forward_actor(batch)[0]
    actual = (theirs - batch.behaviour).abs()[batch.mask]
    mean, largest = MOST[dtype]
    assert batch.behaviour[batch.mask].mean() < -0.3, "there is something to compare"
    report(
        f"{dtype}: |learner - vLLM| of {actual.numel()} sampled logprobs "
        f"mean {actual.mean():.2g}, max {actual.max():.2g}"
    )
    assert actual.mean() < mean and actual.max() < largest
    without = (whole - batch.behaviour).abs()[batch.mask]
    report(f"{dtype}: without the mask of {len(MASKED)} control tokens mean {without.mean():.2g}")
    assert dtype == "bfloat16" or without.mean() > 100 * mean, (
        "masked tokens have a probability without the mask"
    )


@torch.no_grad()
def move(models: Models) -> None:
    """Make it another version than the folder's, as far away as many updates."""
    random = torch.Generator().manual_seed(7)
    for parameter in models.actor.engine.module.parameters():
        noise = torch.randn(parameter.shape, generator=random) * parameter.std().clamp(min=0.05)
        parameter += 0.1 * noise.to(parameter.dtype)
