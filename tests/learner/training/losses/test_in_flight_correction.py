"""Answers of which two versions wrote a part each: every ratio is against the version that sampled that token."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prefixrl.common.wire.messages import groups as messages
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.models.batch import PaddedRows, Sample, iteration_data, pad
from prefixrl.learner.training.ppo import PolicySettings, PolicyTerms, policy_loss

VOCABULARY, CLIP, CAP = 7, 0.2, 1.3
SPANS = (((2, 3), (3, 2)), ((2, 4),), ((3, 1), (4, 1), (5, 3)))
"""(version, tokens) of each row."""
Tables = dict[int, NDArray[np.float64]]


@dataclass
class Case:
    """Logprob tables (row, position, token) of the policies that wrote the rows, and of the learner's."""

    policies: Tables
    proximal: NDArray[np.float64]
    current: NDArray[np.float64]
    advantages: NDArray[np.float64]
    samples: list[Sample]


def table(random: np.random.Generator) -> NDArray[np.float64]:
    logits = random.normal(0.0, 0.5, (len(SPANS), 5, VOCABULARY))
    logs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logs


def case() -> Case:
    """Rows as they arrive from a broker, each token with the logprob under the policy of its own version."""
    random = np.random.Generator(np.random.PCG64(3))
    policies = {version: table(random) for version in (2, 3, 4, 5)}
    rows = []
    for index, spans in enumerate(SPANS):
        writers = [version for version, size in spans for _ in range(size)]
        tokens = random.integers(0, VOCABULARY, len(writers)).astype(np.int32)
        own = [policies[v][index, t, tokens[t]] for t, v in enumerate(writers)]
        named = tuple(messages.VersionSpan(version, f"d{version}", size) for version, size in spans)
        rows.append(
            messages.Row(
                tokens=pack_tokens(tokens),
                logprobs=pack_logprobs(own),
                finish="length",
                spans=named,
            )
        )
    group = messages.GroupPrefixes(
        seq=0,
        prompt=messages.Prompt("p", "?", "1"),
        seed=0,
        prompt_tokens=pack_tokens([1, 2]),
        rows=tuple(rows),
    )
    scored = messages.ScoredGroup(
        prefixes=group,
        version=2,
        weights_digest="d2",
        verdicts=(
            messages.Verdict(
                reward=1.0,
                status="ok",
                extracted="",
                finish="eos",
                completion_tokens=0,
                elapsed_ms=0,
            ),
        )
        * len(rows),
        scorer="s",
    )
    lengths = tuple((2, sum(size for _, size in spans)) for spans in SPANS)
    stages = messages.StageTimes(0.0, 0.0, 0.0, 0.0)
    announced = messages.BatchGroup(
        seq=0,
        prompt_id="p",
        version=2,
        weights_digest="d2",
        lengths=lengths,
        rewards=(1.0,) * len(rows),
        stages=stages,
        statuses={},
    )
    data = iteration_data(
        Batch(iteration=5, total_iterations=9, seed=0, groups=(announced,), waited_s={}),
        {0: scored},
    )
    return Case(
        policies,
        table(random),
        table(random),
        random.normal(0.0, 1.0, (len(SPANS), 5)),
        [data.samples[row] for row in range(len(SPANS))],
    )


def gathered(logs: NDArray[np.float64], batch: PaddedRows) -> torch.Tensor:
    picked = torch.from_numpy(logs).float().gather(-1, batch.tokens[..., None])[..., 0]
    return picked.masked_fill(~batch.mask, 50.0)


def slow_loss(case: Case, correction: str) -> float:
    """Token by token, each ratio from the table of the version that its span names."""
    total, tokens = 0.0, 0
    for index, (sample, spans) in enumerate(zip(case.samples, SPANS, strict=True)):
        place = 0
        for version, size in spans:
            for _ in range(size):
                token = sample.tokens[place]
                theta = math.exp(case.current[index, place, token])
                proximal = math.exp(case.proximal[index, place, token])
                behaviour = math.exp(case.policies[version][index, place, token])
                ratio = theta / (behaviour if correction == "behaviour" else proximal)
                weight = min(proximal / behaviour, CAP) if correction == "decoupled" else 1.0
                advantage = case.advantages[index, place]
                bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
                total -= weight * min(ratio * advantage, bounded * advantage)
                place, tokens = place + 1, tokens + 1
    return total / tokens


@pytest.mark.parametrize("correction", ["decoupled", "behaviour", "none"])
def test_the_loss_is_the_slow_one_that_asks_each_tokens_own_version(correction: str) -> None:
    made = case()
    batch = pad(made.samples, 0)
    terms = PolicyTerms(
        logprobs=gathered(made.current, batch),
        entropy=torch.zeros_like(batch.behaviour),
        proximal=gathered(made.proximal, batch),
        behaviour=batch.behaviour,
        reference=None,
        advantages=torch.from_numpy(made.advantages).float(),
        mask=batch.mask,
        ages=torch.zeros_like(batch.behaviour),
    )
    settings = PolicySettings(
        correction=correction,  # type: ignore[arg-type]
        clip=CLIP,
        importance_cap=CAP,
        aggregation="token",
        entropy=0.0,
        kl_in_loss=0.0,
        kl_estimator="k2",
    )
    loss, sums = policy_loss(terms, settings, float(batch.mask.sum()))
    assert loss.item() == pytest.approx(slow_loss(made, correction), abs=1e-5)
    assert 0 < sums["importance_capped"] < sums["units"]


def test_every_token_carries_its_version_and_the_oldest_is_the_samples() -> None:
    samples = case().samples
    assert [each.versions.tolist() for each in samples] == [
        [2, 2, 2, 3, 3],
        [2] * 4,
        [3, 4, 5, 5, 5],
    ]
    assert [each.versions.min() for each in samples] == [2, 2, 3]
