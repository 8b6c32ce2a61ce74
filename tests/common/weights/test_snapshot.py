"""Snapshots of weights: what is written is what is rebuilt, and anything else is refused by name."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.weights.folders import prune, versions
from prefixrl.common.weights.snapshot import (
    BadSnapshot,
    Verifier,
    as_bytes,
    check_manifest,
    describe,
    view_tensors,
    write_snapshot,
)
from prefixrl.common.wire.messages.weights import Manifest

Tensors = dict[str, torch.Tensor]


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensors:
    """Tensors of any small shape (empty and scalar ones too), with NaN, infinities and -0.0 among the values."""
    names = draw(
        st.lists(st.text("abc.w", min_size=1, max_size=6), unique=True, min_size=1, max_size=5)
    )
    tensors: Tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = int(torch.tensor(shape).prod()) if shape else 1
        values = draw(st.lists(st.floats(width=16), min_size=count, max_size=count))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        tensors[name] = torch.tensor(values, dtype=dtype).reshape(shape)
    return tensors


def data_of(tensors: Tensors) -> bytearray:
    return bytearray(b"".join(bytes(as_bytes(tensors[name])) for name in sorted(tensors)))


def rebuild(manifest: Manifest, data: bytearray) -> Tensors:
    """Tensors that share writable bytes, once these are verified."""
    view = memoryview(data)
    Verifier(manifest, view).advance(manifest.size_bytes)
    return view_tensors(manifest, view)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 4, generator=generator),
        "a.bias": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, generator=generator).t(),
    }


@given(some_tensors())
def test_a_snapshot_is_rebuilt_bit_for_bit(tensors: Tensors) -> None:
    manifest = describe(3, tensors)
    check_manifest(manifest)
    rebuilt = rebuild(manifest, data_of(tensors))
    assert list(rebuilt) == sorted(tensors)
    for name, tensor in tensors.items():
        assert (rebuilt[name].dtype, rebuilt[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(rebuilt[name]) == bits(tensor)


@given(some_tensors(), st.randoms())
def test_the_digest_depends_on_names_and_values_and_not_on_their_order(
    tensors: Tensors, order: random.Random
) -> None:
    items = list(tensors.items())
    order.shuffle(items)
    manifest = describe(3, tensors)
    assert describe(3, dict(items)) == manifest
    assert describe(4, tensors).digest == manifest.digest
    name, tensor = items[0]
    assert describe(
        3, {**tensors, name: torch.cat([tensor.reshape(-1), torch.ones(1)])}
    ).digest != (manifest.digest)
    others = {key: value for key, value in items if key != name}
    assert describe(3, {**others, f"{name}x": tensor}).digest != manifest.digest


@given(some_tensors(), st.data())
def test_one_flipped_bit_is_found_and_its_tensor_named(
    tensors: Tensors, data: st.DataObject
) -> None:
    manifest, damaged = describe(3, tensors), data_of(tensors)
    if not damaged:
        return
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    (hit,) = (
        entry.name
        for entry in manifest.tensors
        if entry.offset_bytes <= place < entry.offset_bytes + entry.size_bytes
    )
    with pytest.raises(BadSnapshot) as caught:
        rebuild(manifest, damaged)
    assert str(caught.value) == f"weight {hit} of version 3 arrived damaged"


def test_a_tensor_that_is_not_contiguous_is_written_in_its_logical_order(tensors: Tensors) -> None:
    rebuilt = rebuild(describe(1, tensors), data_of(tensors))
    assert not tensors["c"].is_contiguous()
    assert torch.equal(rebuilt["c"], tensors["c"])


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"weight w has dtype float16; allowed are float32, bfloat16"
    ):
        describe(1, {"w": torch.zeros(2, dtype=torch.float16)})


def test_a_manifest_that_contradicts_itself_is_refused(tensors: Tensors) -> None:
    good = describe(7, tensors)
    first, *others = good.tensors
    for entry, message in (
        ({"offset_bytes": 4}, "a.bias does not fit its shape: 10 bytes at 4"),
        ({"size_bytes": 8}, "a.bias does not fit its shape: 8 bytes at 0"),
        ({"shape": (-5,)}, r"a.bias has a negative dimension in \(-5,\)"),
        ({"dtype": "float32"}, "a.bias does not fit its shape"),
        ({"name": "a.other"}, "version 7 does not match its own digest"),
        ({"checksum": "0" * 16}, "version 7 does not match its own digest"),
    ):
        changed = msgspec.structs.replace(first, **entry)
        with pytest.raises(BadSnapshot, match=message):
            check_manifest(msgspec.structs.replace(good, tensors=(changed, *others)))
    for whole in ({"size_bytes": good.size_bytes + 4}, {"digest": "0" * 32}):
        with pytest.raises(BadSnapshot, match="version 7 does not match its own digest"):
            check_manifest(msgspec.structs.replace(good, **whole))
    check_manifest(good)


def test_the_digest_follows_from_the_manifest() -> None:
    values = torch.tensor([1.0, 2.0])
    checksum = xxhash.xxh3_64_hexdigest(b"\x00\x00\x80\x3f\x00\x00\x00\x40")
    manifest = describe(0, {"w": values})
    assert manifest.tensors[0].checksum == checksum
    assert manifest.digest == xxhash.xxh3_128_hexdigest(f"w:float32:(2,):{checksum};".encode())


def test_a_written_snapshot_is_whole_and_replaces_one_of_its_version(
    tensors: Tensors, tmp_path: Path
) -> None:
    directory = tmp_path / "weights"
    for given_tensors in (tensors, {"only": torch.ones(3)}):
        manifest = describe(12, given_tensors)
        write_snapshot(directory, manifest, given_tensors)
        (folder,) = directory.iterdir()
        assert folder.name == "v00000012"
        read = msgspec.msgpack.decode((folder / "manifest.msgpack").read_bytes(), type=Manifest)
        assert read == manifest
        rebuilt = rebuild(read, bytearray((folder / "weights.bin").read_bytes()))
        assert all(torch.equal(rebuilt[name], tensor) for name, tensor in given_tensors.items())


def test_pruning_keeps_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    for version in (3, 12, 4, 100):
        weights = {"w": torch.full((2,), float(version))}
        write_snapshot(tmp_path, describe(version, weights), weights)
    assert versions(tmp_path) == [3, 4, 12, 100]
    prune(tmp_path, {4, 100, 5})
    assert versions(tmp_path) == [4, 100]
    assert versions(tmp_path / "not there") == []
