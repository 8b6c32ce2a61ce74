"""Copies of weights: whole, finite, in buffers that are used again but never under their reader."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from benchmarks.simulated import PROBE
from prefixrl.common.errors import TrainingFault
from prefixrl.common.weights.folders import folder, read_mapped
from prefixrl.common.weights.snapshot import as_bytes
from prefixrl.common.wire.messages.weights import Manifest, WeightsNote
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.loop import Learner
from prefixrl.learner.models.model import Models
from prefixrl.learner.run.collapse_answers import CollapseAnswers
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.weights import publish
from prefixrl.learner.weights.copies import SETS, HostCopies, not_finite
from prefixrl.learner.weights.publish import Publisher
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model

NEVER_S = 60.0


class AcceptingClient:
    """A broker's client whose announcements are taken at once."""

    def __init__(self, endpoint: str, stop: StopSignal) -> None:
        pass

    def published(self, note: WeightsNote) -> None:
        pass

    def close(self) -> None:
        pass


def nobody_waits() -> None:
    raise AssertionError("no set of buffers is free")


class Reader:
    """Stands for the publisher; by default nobody may wait for it."""

    def __init__(self) -> None:
        self.check: Callable[[], None] = nobody_waits


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(300, 7, generator=random).bfloat16(),
        "b": torch.randn(5, generator=random),
        "empty": torch.empty(0, 3),
    }


def test_a_copy_is_bit_identical_and_stays_when_the_weights_change() -> None:
    own, expected = weights(1), weights(1)
    copied, bad = HostCopies(Reader()).copy(own.items())
    for tensor in own.values():
        tensor.zero_()
    copied.wait()
    assert bad == []
    assert {name: bytes(as_bytes(each)) for name, each in copied.tensors.items()} == {
        name: bytes(as_bytes(each)) for name, each in expected.items()
    }


def test_buffers_are_used_again_once_they_are_released_and_not_before() -> None:
    copies = HostCopies(Reader())
    first = [copies.copy(weights(seed).items())[0] for seed in range(SETS)]
    places = [each.tensors["a"].data_ptr() for each in first]
    assert len(set(places)) == SETS
    with pytest.raises(AssertionError, match="no set of buffers is free"):
        copies.copy(weights(9).items())
    first[1].release()
    again, _ = copies.copy(weights(9).items())
    assert again.tensors["a"].data_ptr() == places[1]
    assert torch.equal(first[0].tensors["a"], weights(0)["a"])


def test_room_is_there_until_both_sets_wait_for_the_disk_and_is_not_taken_by_asking() -> None:
    reader = Reader()
    copies = HostCopies(reader)
    handed = []
    for seed in range(SETS):
        copies.wait_for_room()
        handed.append(copies.copy(weights(seed).items())[0])
    with pytest.raises(AssertionError, match="no set of buffers is free"):
        copies.wait_for_room()
    reader.check = handed[0].release
    copies.wait_for_room()
    reader.check = nobody_waits
    copies.copy(weights(9).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(
    dtype: torch.dtype, value: float
) -> None:
    for place in (0, 17, 4095):
        tensor = torch.ones(4096, dtype=dtype)
        tensor[place] = value
        assert not_finite({"fine": torch.ones(3), "bad": tensor}) == ["bad"]
        assert HostCopies(Reader()).copy({"bad": tensor}.items())[1] == ["bad"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finite_weights_whose_sum_overflows_are_no_fault(dtype: torch.dtype) -> None:
    tensor = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
    assert not_finite({"w": tensor}) == []
    assert HostCopies(Reader()).copy({"w": tensor}.items())[1] == []


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A publisher whose announcements the broker takes at once."""
    monkeypatch.setattr(publish, "BrokerClient", AcceptingClient)
    return Publisher("tcp://127.0.0.1:1", tmp_path, PROBE, deltas=False)


def test_the_snapshot_of_a_copy_is_bit_identical(publisher: Publisher, tmp_path: Path) -> None:
    for version in range(4):
        publisher.publish(version, weights(version).items(), np.zeros(1, np.float32))
    publisher.flush(3)
    written = (folder(tmp_path, 3) / "weights.bin").read_bytes()
    assert written == b"".join(bytes(as_bytes(tensor)) for _, tensor in sorted(weights(3).items()))
    publisher.close()


def test_weights_that_are_not_finite_are_refused_at_once_by_name(
    publisher: Publisher, tmp_path: Path
) -> None:
    bad = weights(1) | {"b": torch.tensor([1.0, float("nan")])}
    with pytest.raises(
        TrainingFault, match="version 0 has non-finite weights in b; it is not published"
    ):
        publisher.publish(0, bad.items(), np.zeros(1, np.float32))
    publisher.close()
    assert not folder(tmp_path, 0).exists()


def test_what_the_thread_makes_of_finite_weights_is_never_published_if_it_is_not(
    publisher: Publisher, tmp_path: Path
) -> None:
    has_made = threading.Event()

    def overflow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        has_made.set()
        return {name: tensor * 3e38 * 10 for name, tensor in tensors.items()}

    publisher.publish(0, {"w": torch.ones(3)}.items(), np.zeros(1, np.float32), overflow)
    assert has_made.wait(NEVER_S)
    publisher.close()
    with pytest.raises(TrainingFault, match="version 0 has non-finite weights in w"):
        publisher.check()
    assert not folder(tmp_path, 0).exists()


@pytest.mark.parametrize("low_rank", [None, {"rank": 2}], ids=["full", "low rank"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_the_learner_publishes_what_its_checkpoints_export(
    publisher: Publisher, low_rank: dict[str, int] | None, stage: int, warned: int, tmp_path: Path
) -> None:
    learner_settings = {"lora": low_rank, "deepspeed": {"zero_optimization": {"stage": stage}}}
    config = run_config(save_model(tmp_path / "adapter"), learner=learner_settings)
    models = Models.load(config, 0, 1, config.adapter.model)
    answers = CollapseAnswers(config, tmp_path, models, None)
    learner = Learner(
        config, tmp_path, cast(BrokerClient, None), models, None, 1, StopSignal(), PROBE, answers
    )
    weights = (
        (name.removeprefix("model."), tensor) for name, tensor in models.actor.full_tensors()
    )
    publisher.publish(0, weights, np.zeros(1, np.float32), learner.published)
    publisher.flush(0)
    exported = models.state_dict_for_publication()
    written = (folder(tmp_path, 0) / "weights.bin").read_bytes()
    assert written == b"".join(bytes(as_bytes(exported[name])) for name in sorted(exported))
    publisher.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_after_version_0_a_run_with_low_rank_matrices_publishes_these_alone(
    publisher: Publisher, stage: int, warned: int, tmp_path: Path
) -> None:
    lora = {"lora": {"rank": 2}, "deepspeed": {"zero_optimization": {"stage": stage}}}
    config = run_config(save_model(tmp_path / "adapter"), learner=lora)
    models = Models.load(config, 0, 1, config.adapter.model)
    answers = CollapseAnswers(config, tmp_path, models, None)
    learner = Learner(
        config, tmp_path, cast(BrokerClient, None), models, None, 1, StopSignal(), PROBE, answers, 1
    )
    names = {name for name, _ in models.actor.full_tensors(learner.sends)}
    assert names == {name for name, _ in models.actor.full_tensors() if ".lora_" in name}
    weights = (
        (name.removeprefix("model."), tensor)
        for name, tensor in models.actor.full_tensors(learner.sends)
    )
    publisher.publish(1, weights, np.zeros(1, np.float32), learner.published)
    publisher.flush(1)
    manifest, _ = read_mapped(folder(tmp_path, 1), Manifest)
    assert {entry.name for entry in manifest.tensors} == {
        name.removeprefix("model.").replace(".default", "") for name in names
    }
    publisher.close()
    learner.iteration = 0
    assert {name for name, _ in models.actor.full_tensors(learner.sends)} > names, (
        "version 0 is the folder's weights"
    )


def test_infinities_of_both_signs_are_found() -> None:
    assert not_finite({"w": torch.tensor([float("inf"), float("-inf")])}) == ["w"]


def test_a_weight_of_another_shape_or_gone_leaves_no_trace_in_the_buffers() -> None:
    copies = HostCopies(Reader())
    for _ in range(SETS):
        copies.copy(weights(1).items())[0].release()
    other = {"a": torch.ones(2, 2)}
    copied, _ = copies.copy(other.items())
    assert {name: tensor.tolist() for name, tensor in copied.tensors.items()} == {
        "a": [[1.0, 1.0], [1.0, 1.0]]
    }
