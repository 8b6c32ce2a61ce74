"""Low-rank matrices in a running vLLM: the policy of merged weights, version by version."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.load import load
from prefixrl.common.engines.vllm.engine import VllmEngine
from prefixrl.common.weights.low_rank import FIRST, SECOND
from support.models import vllm_world as world
from support.models.engine_jobs import finish
from support.models.versioned import forward, fresh_model
from support.models.vllm_world import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

ADAPTER = EXAMPLE / "adapter"
RANK, ALPHA, VERSIONS = 4, 8, 5
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(vllm_is_there: None) -> Iterator[VllmEngine]:
    run = load(EXAMPLE / "run.toml", (f"learner.lora={{rank={RANK}, alpha={ALPHA}}}",))
    with world.started(ADAPTER, run=run) as engine:
        yield engine


def version(number: int) -> tuple[Tensors, Tensors]:
    """Matrices of all linear layers, and the whole weights that they stand for."""
    own, random = world.reference(ADAPTER).weights(), torch.Generator().manual_seed(number)
    sent, merged = {}, dict(own)
    for name, weight in own.items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            first, second = sent[layer + FIRST], sent[layer + SECOND] = (
                0.1 * torch.randn(RANK, weight.shape[1], generator=random),
                0.1 * torch.randn(weight.shape[0], RANK, generator=random),
            )
            merged[name] = weight + ALPHA / RANK * second @ first
    return sent, merged


def test_every_version_is_that_of_merged_weights_and_has_a_checksum_of_its_own(
    engine: VllmEngine, report: Callable[[str], None]
) -> None:
    text = world.probe()
    rows = [(text[:4], text[4:])] * 16
    initial = forward(fresh_model(ADAPTER), text, 1.0)[3:]
    assert np.abs(engine.score(rows) - np.tile(initial, 16)).max() < 1e-5, "before there are any"
    actual, sums = [], [engine.checksum()]
    for number in range(1, VERSIONS + 1):
        sent, merged = version(number)
        engine.install(snapshot_of(number, sent))
        expected = forward(fresh_model(ADAPTER, merged), text, 1.0)[3:]
        actual.append(np.abs(engine.score(rows) - np.tile(expected, 16)).max())
        sums.append(engine.checksum())
        assert engine.weights().keys() == sent.keys()
    report(
        f"matrices against merged weights: at most {max(actual):.2g}; checksums follow: {sums[-1].follows}"
    )
    assert max(actual) < 1e-5
    assert (
        len({each.value for each in sums}) == VERSIONS + 1
        and len({each.layout for each in sums}) == 1
    )


def test_what_is_sampled_is_of_the_newest_matrices(engine: VllmEngine) -> None:
    sent, merged = version(77)
    finish(engine, world.job("a", tokens=80))  # the cache has its blocks under the old ones
    engine.install(snapshot_of(9, sent))
    job = world.job("b", tokens=80)
    rows = finish(engine, job)["b"].rows
    assert world.differences(fresh_model(ADAPTER, merged), job.rows, rows, 0.7).max() < 1e-3
    assert {span[0] for row in rows for span in row.spans} == {9}
