"""Published versions, the proofs of an engine, and the exchange with the weight server."""

from typing import Literal

from prefixrl.common.wire.messages.fields import Count, Message, Name, Part, Version


class WeightsNote(Part):
    """One published version: what a worker must fetch and how its installation is proved."""

    version: Version
    digest: Name
    probe_tokens: bytes = b""
    """int32 ids of the rows that the engine scores after installing, end to end; scorers get none."""
    probe_logprobs: bytes = b""
    """The learner's logprobs, at temperature 1, of the scored tokens of every row, under the published weights."""
    probe_rows: tuple[tuple[Count, Count], ...] = ()
    """Tokens of each row: those given, and those scored after them. Empty: one row, scored but for its first."""


Proof = Literal["digest", "change", "checksum"]
"""Evidence that an engine holds a version (docs/weights.md)."""


class PreviousProof(Part):
    """The version that an engine proved last, and its own logprobs of the probe with it."""

    version: Version
    digest: Name
    probe_logprobs: bytes


class EngineChecksum(Part):
    """Checksum of the weights that an engine computes with."""

    value: Name
    follows: Literal["snapshot", "other", "unknown"]
    """Equal to what follows from the installed snapshot, not equal, or in a layout that cannot be told from it."""
    before: Name = ""
    """Checksum before the installation, "" where it was not made."""
    layout: Name = ""
    """Name of the layout: weights in the same one have the same checksum."""


class TensorEntry(Part, kw_only=True):
    """The position of one tensor in the snapshot's bytes."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    checksum: str


class Delta(Part, kw_only=True):
    """The XOR of the bytes of two snapshots, in blocks of `chunk_bytes` of the snapshot."""

    version: int
    digest: str
    """Digest of the snapshot it leads to."""
    base_digest: str
    """Digest of the snapshot it starts from: a version may have had several digests, a digest has one content."""
    plane_bytes: int
    """Bytes per value: each block holds the first byte of every value, then the second, and so on, then zstd."""
    sizes: tuple[int, ...]
    """Compressed bytes per block; 0 where nothing changed."""


class GetManifest(Message):
    """A request for the Manifest of a version."""

    version: int


class GetChunk(Message):
    """A request for one Chunk of a version."""

    version: int
    index: int
    is_delta: bool = False
    """Block `index` of the delta that leads to `version`, instead of the version's own bytes."""


class Manifest(Message, kw_only=True):
    """The content of a snapshot: where each tensor stands, and the deltas that lead to it."""

    version: int
    digest: str
    """xxh3-128 of the whole snapshot."""
    size_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    deltas: tuple[Delta, ...] = ()
    """Oldest first, each starting where the one before ends, the last ending here. A worker that holds one of the bases
    may pull the deltas from there on instead of the snapshot."""


class Chunk(Message):
    """A piece of a snapshot or delta. The bytes are the one payload frame."""

    version: int
    index: int
    is_delta: bool = False


class Gone(Message):
    """This version is no longer held (or never was)."""

    version: int
    latest: int
    """Newest version that is held; -1 while nothing is published."""


ToWeights = GetManifest | GetChunk
FromWeights = Manifest | Chunk | Gone
