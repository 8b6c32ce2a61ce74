"""The manifest of a checkpoint: the trainer's state, and the digest of every file."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from prefixrl.common.errors import ConfigError, DataError

FORMAT = 2


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of training, besides weights and moments."""

    iteration: int
    """Iterations completed, which is the version of the weights."""
    optimizer_steps: int
    world_size: int


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the checkpoint."""

    path: str
    size_bytes: int
    digest: str
    """xxh3-128 of its bytes."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a checkpoint: state, format and the digest of every file."""

    format: int
    state: TrainerState
    zero_stage: int
    dtype: str
    files: tuple[FileEntry, ...]
    digest: str = ""
    """xxh3-128 of the manifest as JSON without it; "" where an earlier release wrote the checkpoint."""

    def sealed(self) -> "CheckpointManifest":
        """Return the manifest with its digest."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(self, digest=xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare)))


class _Written(msgspec.Struct, frozen=True):
    format: int


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest of a checkpoint, with its digest."""
    (folder / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest.sealed())))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        DataError: it is missing or damaged.
        ConfigError: another release wrote it.
    """
    try:
        body = (folder / "manifest.json").read_bytes()
        written = msgspec.json.decode(body, type=_Written).format
        manifest = msgspec.json.decode(body, type=CheckpointManifest) if written == FORMAT else None
    # Damaged bytes may be no text (UnicodeDecodeError, a ValueError) or nest too deeply.
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(f"{folder} has no readable manifest: {error}") from error
    if manifest is None and not _has_its_digest(body):
        raise DataError(f"{folder} has a manifest with another digest than when it was written")
    if manifest is None:
        raise ConfigError(
            f"{folder} has checkpoint format {written}, this release reads {FORMAT}; continue with the release that "
            f"wrote it, or start a run in another directory"
        )
    if manifest.digest and manifest != manifest.sealed():
        raise DataError(f"{folder} has a manifest with another digest than when it was written")
    return manifest


def _has_its_digest(body: bytes) -> bool:
    """Return False if a manifest is damaged, which is no sign of another release."""
    fields = msgspec.json.decode(body)
    digest, bare = fields.get("digest", ""), {**fields, "digest": ""}
    return not digest or digest == xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


def damage(folder: Path) -> str:
    """Return the fault of a checkpoint's files, or "" when they are whole."""
    try:
        manifest = read_manifest(folder)
        for entry in manifest.files:
            size = (folder / entry.path).stat().st_size
            if size != entry.size_bytes:
                return f"{entry.path} holds {size} bytes instead of {entry.size_bytes}"
            if _digest(folder / entry.path) != entry.digest:
                return f"{entry.path} has another digest than when it was written"
    except (DataError, OSError, ValueError) as error:
        return str(error)
    return ""


def entries(folder: Path) -> Iterator[FileEntry]:
    """Yield an entry for every file of a checkpoint."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield FileEntry(str(path.relative_to(folder)), path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()
