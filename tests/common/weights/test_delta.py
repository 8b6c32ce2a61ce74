"""Deltas: applied, they are the newer snapshot bit by bit, whatever changed; what is damaged is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.weights.delta import decode, encode, is_same_layout, plane_bytes, write_delta
from prefixrl.common.weights.folders import delta_folder, folder, prune
from prefixrl.common.weights.snapshot import BadSnapshot, describe, write_snapshot
from support.fakes import publish, publish_next

some_bytes = st.binary(min_size=0, max_size=200)


def twin(before: bytes, after: bytes, planes: int) -> bytes:
    """The XOR of two blocks, byte by byte of each value, as the format says.

    What is no whole value stands at the end.
    """
    changed = [one ^ other for one, other in zip(before, after, strict=True)]
    whole = len(changed) - len(changed) % planes
    sorted_ = [changed[place] for plane in range(planes) for place in range(plane, whole, planes)]
    return bytes(sorted_ + changed[whole:])


@given(some_bytes, st.data(), st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_what_is_applied_to_the_base_is_the_newer(
    before: bytes, data: st.DataObject, block: int, planes: int
) -> None:
    after = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    pieces = list(encode(bytearray(before), bytearray(after), block, planes))
    assert len(pieces) == -(-len(before) // block)
    rebuilt = b""
    for index, piece in enumerate(pieces):
        base = np.frombuffer(before[index * block : (index + 1) * block], dtype=np.uint8)
        rebuilt += (base ^ decode(piece, base.size, planes)).tobytes()
        assert (piece == b"") == (base.tobytes() == after[index * block : (index + 1) * block])
    assert rebuilt == after


@given(st.binary(min_size=1, max_size=100), st.data(), st.sampled_from([1, 2, 4]))
def test_a_block_is_equal_to_that_of_the_slow_twin(
    before: bytes, data: st.DataObject, planes: int
) -> None:
    import zstandard

    after = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    (piece,) = encode(bytearray(before), bytearray(after), 1000, planes)
    expected = twin(before, after, planes)
    assert (zstandard.decompress(piece) if piece else bytes(len(before))) == expected


@given(st.binary(max_size=100), st.integers(1, 100))
def test_bytes_that_are_no_block_of_the_size_are_refused(junk: bytes, size: int) -> None:
    try:
        actual = decode(junk, size, 2)
    except BadSnapshot:
        return
    assert actual.size == size


def test_a_block_that_claims_to_be_larger_is_refused_before_it_is_unpacked() -> None:
    (piece,) = encode(bytearray(2**20), bytearray(b"\1" * 2**20), 2**20, 2)
    with pytest.raises(BadSnapshot, match="does not hold 16 bytes"):
        decode(piece, 16, 2)


def test_a_delta_is_written_beside_its_snapshot_and_pruned_after_eight_versions(
    tmp_path: Path,
) -> None:
    tensors = publish(tmp_path, 1)
    for version in range(2, 13):
        tensors = publish_next(tmp_path, version, tensors)
        prune(tmp_path, {version - 1, version})
    assert {path.name for path in tmp_path.glob("d*")} == {
        delta_folder(tmp_path, each).name for each in range(5, 13)
    }


def test_no_delta_is_written_where_it_does_not_pay_or_makes_no_sense(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 2)  # all values differ
    assert write_delta(tmp_path, 1, 2) is None
    other = {"layer.weight": torch.zeros(64, 32)}
    write_snapshot(tmp_path, describe(3, other), other)
    assert write_delta(tmp_path, 2, 3) is None
    write_snapshot(tmp_path, describe(4, {}), {})
    write_snapshot(tmp_path, describe(5, {}), {})
    assert write_delta(tmp_path, 4, 5) is None
    assert not delta_folder(tmp_path, 2).exists() and folder(tmp_path, 2).exists()
    assert not list(tmp_path.glob(".d*"))


def test_layout_and_planes_follow_from_the_tensors() -> None:
    fp32, bf16 = {"a": torch.zeros(3)}, {"a": torch.zeros(3).bfloat16()}
    assert (plane_bytes(describe(0, fp32)), plane_bytes(describe(0, bf16))) == (4, 2)
    assert plane_bytes(describe(0, fp32 | {"b": bf16["a"]})) == 2
    assert is_same_layout(describe(0, fp32), describe(1, {"a": torch.ones(3)}))
    assert not is_same_layout(describe(0, fp32), describe(1, bf16))
    assert not is_same_layout(describe(0, fp32), describe(1, {"b": torch.zeros(3)}))
