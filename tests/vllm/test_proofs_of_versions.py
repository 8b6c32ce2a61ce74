"""Every version is proved on a vLLM in bfloat16, and installations that do nothing are not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.common.wire.packing import ProbeRow
from prefixrl.learner.broker.workers.proofs import Checksums, judge
from support.models import vllm_world as world
from support.models.vllm_world import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

ADAPTER = EXAMPLE / "adapter"
UPDATES, STALE = 50, (7, 23, 41)
TOLERANCE = 0.2
SKIPPED = """
            whole = plugin.SharedMemoryWeights.receive_weights
            def receive(self, update):
                self.received = getattr(self, "received", 0) + 1
                if self.received not in {stale}:
                    whole(self, update)
            plugin.SharedMemoryWeights.receive_weights = receive
"""
"""A fault to plant: some installations succeed and change nothing."""


def rows() -> list[ProbeRow]:
    random = np.random.default_rng(8)
    return [
        (given.astype(np.int32), scored.astype(np.int32))
        for given, scored in zip(
            random.integers(2, 40, (16, 20)), random.integers(2, 40, (16, 64)), strict=True
        )
    ]


@pytest.mark.parametrize("lr", [2.5e-4, 5e-7], ids=["seen", "too small to be seen"])
def test_fifty_versions_in_bfloat16_are_proved_and_three_stale_ones_are_caught(
    lr: float,
    vllm_is_there: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], None],
) -> None:
    """The learner is transformers in bfloat16 here: other kernels, and masters in float32 as DeepSpeed keeps them."""
    world.plant(tmp_path, SKIPPED.format(stale=set(STALE)).strip())
    monkeypatch.syspath_prepend(tmp_path)  # a spawned process begins with its parent's path
    run, text, by = world.config(), rows(), {"change": 0, "checksum": 0}
    run = run.model_copy(update={"learner": run.learner.model_copy(update={"dtype": "bfloat16"})})
    learner = TransformersEngine(str(ADAPTER), "cpu", "bfloat16", 1, "float32")
    masters = {name: tensor.float() for name, tensor in learner.weights().items()}
    random, checksums, caught = torch.Generator().manual_seed(1), Checksums(), []
    with world.started(ADAPTER, run=run) as engine:
        before, sums = (engine.score(text), learner.score(text)), engine.checksum().value
        for version in range(1, UPDATES + 1):
            for master in masters.values():
                master += 8 * lr * (2 * torch.rand(master.shape, generator=random) - 1)
            published = {name: master.bfloat16() for name, master in masters.items()}
            learner.install(snapshot_of(version, published))
            for attempt in range(2):
                engine.install(snapshot_of(version, published))
                scored, actual = engine.score(text), engine.checksum()
                judged = judge(scored, learner.score(text), before, TOLERANCE)
                shown = EngineChecksum(actual.value, actual.follows, sums, actual.layout)
                objection = checksums.objection(f"d{version}", shown, f"d{version - 1}")
                is_proved = judged.outcome == "proved" or (
                    judged.outcome == "unclear" and objection is None
                )
                if is_proved:
                    break
                assert attempt == 0, (version, judged, objection)
                caught.append(version)
            by["change" if judged.outcome == "proved" else "checksum"] += 1
            checksums.admit(f"d{version}", actual)
            before, sums = (scored, learner.score(text)), actual.value
    report(
        f"lr {lr:g}: proved {by}, refused {caught}, compared with the snapshot: {actual.follows}"
    )
    installs = iter(range(1, UPDATES + len(STALE) + 1))
    expected = []
    for version in range(1, UPDATES + 1):
        if next(installs) in STALE:
            expected.append(version)
            next(installs)
    assert caught == expected
