"""Weights that do not fit the engine.

Nothing is installed, they are asked for again, and three in a row end the rollout.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.simulated import SimulatedEngine
from prefixrl.common.errors import Refusal
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.messages.worker import Beat, Installed, Staged, Swap
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.rollout.loop import Rollout
from support.fakes import run_on_disk

NOTE = WeightsNote(1, "d1", pack_tokens([1, 2, 3]), pack_logprobs([0.0, 0.0]))


class Picky(SimulatedEngine):
    """Installs bf16 only."""

    def install(self, snapshot: Snapshot) -> None:
        if snapshot.tensors["weight"].dtype != torch.bfloat16:
            raise ValueError("weight has dtype float32, the model's is bfloat16")
        super().install(snapshot)


class Fetched:
    """Has a version of these dtypes ready, one after the other, whenever it is asked to fetch."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        self._dtypes = dtypes
        self.asked_again = 0

    def want_version(self, version: int, digest: str) -> None:
        pass

    def again(self) -> None:
        self.asked_again += 1

    def take_snapshot(self) -> Any:
        return snapshot_of(1, {"weight": torch.ones(4, dtype=self._dtypes.pop(0))})


def rollout_of(folder: Path, fetched: Fetched, sent: list[Any]) -> Rollout:
    config = run_on_disk(folder, rollout={"engine": "simulated"}, scorer={"engine": "simulated"})
    link: Any = SimpleNamespace(send=sent.append, vitals=SimpleNamespace())
    engine, fetcher = Picky("rollout", config.simulated), fetched
    return Rollout(config, link, engine, ByteRenderer(), fetcher, config.adapter.model)  # type: ignore[arg-type]


def swap(rollout: Rollout) -> None:
    rollout._handle(Beat(NOTE))
    rollout._handle(Swap(1))
    rollout._swap_weights()


def test_a_version_of_another_dtype_is_fetched_again_and_then_installed(tmp_path: Path) -> None:
    sent: list[Any] = []
    fetched = Fetched([torch.float32, torch.float32, torch.bfloat16])
    rollout = rollout_of(tmp_path, fetched, sent)
    for _ in range(2):
        swap(rollout)
        assert rollout.swap.version == 0
    swap(rollout)
    assert (rollout.swap.version, fetched.asked_again) == (1, 2)
    assert [type(each) for each in sent] == [Staged, Staged, Staged, Installed]


def test_three_in_a_row_end_the_rollout_by_name(tmp_path: Path) -> None:
    fetched = Fetched([torch.float32] * 3)
    rollout = rollout_of(tmp_path, fetched, [])
    swap(rollout)
    swap(rollout)
    with pytest.raises(
        Refusal, match=r"version 1 could not be installed 3 times in a row: .*bfloat16"
    ):
        swap(rollout)
    assert rollout.swap.version == 0
