"""Damage to the file that describes a checkpoint: every changed bit is noticed."""

import random
from pathlib import Path

import msgspec
import pytest
import xxhash

from prefixrl.common.errors import ConfigError, DataError
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import (
    FORMAT,
    CheckpointManifest,
    FileEntry,
    TrainerState,
    read_manifest,
    write_manifest,
)

CONTENT = b"weights"


def write(directory: Path, iteration: int) -> CheckpointManifest:
    """A checkpoint of one file; its manifest."""
    folder = directory / f"step_{iteration:08d}"
    folder.mkdir(parents=True)
    (folder / "actor.safetensors").write_bytes(CONTENT)
    entry = FileEntry("actor.safetensors", len(CONTENT), xxhash.xxh3_128_hexdigest(CONTENT))
    state = TrainerState(iteration, optimizer_steps=iteration * 4, world_size=1)
    manifest = CheckpointManifest(FORMAT, state, 1, "float32", (entry,))
    write_manifest(folder, manifest)
    return read_manifest(folder)


def test_no_changed_bit_of_a_manifest_goes_unnoticed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2)
    path = tmp_path / "step_00000002" / "manifest.json"
    whole, random_ = path.read_bytes(), random.Random(1)
    seen = {"older": 0, "a space": 0}
    for place in range(len(whole)):
        for bit in random_.sample(range(8), 3):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            actual = checkpoint.latest(tmp_path)
            assert actual is not None
            if actual.name == "step_00000002":
                # Only what stands between the values of JSON may differ.
                assert read_manifest(actual) == manifest
                seen["a space"] += 1
            else:
                seen["older"] += 1
    assert seen["older"] > 10 * seen["a space"], seen


def test_a_whole_manifest_of_a_later_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    later = msgspec.structs.replace(manifest, format=FORMAT + 1).sealed()
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(later)}))
    with pytest.raises(ConfigError, match="has checkpoint format 3, this release reads 2"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[" * 100_000, b'{"format": 2}', b"\x00" * 64])
def test_a_manifest_that_is_none_is_a_message(body: bytes, tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    path.write_bytes(body)
    with pytest.raises(DataError, match="has no readable manifest"):
        read_manifest(path.parent)
    with pytest.raises(
        DataError, match=r"every checkpoint in .* is damaged; .* or remove them to begin again"
    ):
        checkpoint.latest(tmp_path)


def test_a_checkpoint_of_the_release_without_digests_can_be_resumed(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    fields = msgspec.json.decode(path.read_bytes())
    del fields["digest"]
    path.write_bytes(msgspec.json.encode(fields))
    assert checkpoint.latest(tmp_path) == path.parent
    assert read_manifest(path.parent).state == manifest.state
