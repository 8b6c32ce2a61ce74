"""A snapshot being assembled in memory: pieces in, verified tensors out. No sockets.

A piece is a chunk of the snapshot, or a block of a delta to be applied to the snapshot the worker holds. Pieces may
come in any order and each counts once, so an interrupted pull goes on where it stood.
"""

from collections.abc import Iterator

import numpy as np

from prefixrl.common.weights.delta import PAYS_BELOW, decode
from prefixrl.common.weights.memory import Memory
from prefixrl.common.weights.snapshot import BadSnapshot, Snapshot, Verifier
from prefixrl.common.wire.messages.weights import Chunk, Delta, GetChunk, Manifest


def chain_from(base: Manifest | None, manifest: Manifest) -> tuple[Delta, ...]:
    """Return the deltas from `base` to `manifest`, oldest first; none for a full pull."""
    if base is None or base.chunk_bytes != manifest.chunk_bytes:
        return ()
    starts = [delta.base_digest for delta in manifest.deltas]
    if base.digest not in starts or base.size_bytes != manifest.size_bytes:
        return ()
    chain = manifest.deltas[len(starts) - 1 - starts[::-1].index(base.digest) :]
    size_bytes = sum(sum(delta.sizes) for delta in chain)
    return chain if size_bytes < PAYS_BELOW * manifest.size_bytes else ()


class Staging:
    """Pieces in the order to ask for them: block by block, within a block delta by delta."""

    def __init__(self, manifest: Manifest, memory: Memory, base: Snapshot | None) -> None:
        self.manifest = manifest
        self.chain = chain_from(base.manifest if base else None, manifest)
        self._memory = memory
        self._base = base.memory.data if base and self.chain else None
        self._data = memory.data
        self._verifier = Verifier(manifest, memory.view)
        self._layers = max(1, len(self.chain))
        blocks = -(-manifest.size_bytes // manifest.chunk_bytes)
        self._open = [self._layers] * blocks
        """Pieces that each block still lacks."""
        self._missing = dict.fromkeys(range(blocks * self._layers))
        self._complete = 0
        for number in list(self._missing) if self.chain else ():
            if not self.size_of(number):
                self._put(number, b"")

    def missing(self) -> Iterator[int]:
        """Return the missing pieces, in order."""
        return iter(list(self._missing))

    @property
    def is_complete(self) -> bool:
        """True if every piece is there, verified."""
        return not self._missing

    def size_of(self, number: int) -> int:
        """Return the bytes of a piece on the wire."""
        block, layer = divmod(number, self._layers)
        return self.chain[layer].sizes[block] if self.chain else self._span(block)[1]

    def request(self, number: int) -> GetChunk:
        """Return the request for a piece."""
        block, layer = divmod(number, self._layers)
        version = self.chain[layer].version if self.chain else self.manifest.version
        return GetChunk(version, block, bool(self.chain))

    def number_of(self, chunk: Chunk) -> int | None:
        """Return the piece that an answer holds; None for one of another pull."""
        if chunk.is_delta != bool(self.chain) or not 0 <= chunk.index < len(self._open):
            return None
        versions = [delta.version for delta in self.chain] or [self.manifest.version]
        return (
            chunk.index * self._layers + versions.index(chunk.version)
            if chunk.version in versions
            else None
        )

    def put(self, number: int, frames: list[memoryview]) -> None:
        """Take a piece unless it is there already; BadSnapshot when its size is not as announced."""
        if number not in self._missing:
            return
        sizes = [len(frame) for frame in frames]
        expected = self.size_of(number)
        if sizes != [expected]:
            raise BadSnapshot(f"chunk {number} holds {sizes} bytes, expected {expected}")
        self._put(number, frames[0])

    def _put(self, number: int, data: memoryview | bytes) -> None:
        block, layer = divmod(number, self._layers)
        start, size = self._span(block)
        block_bytes = self._data[start : start + size]
        if self._base is None:
            np.copyto(block_bytes, np.frombuffer(data, dtype=np.uint8))
        else:
            # Deltas come in any order: a block's first changes the base, later ones the result.
            is_first = self._open[block] == self._layers
            before = self._base[start : start + size] if is_first else block_bytes
            if data:
                np.bitwise_xor(
                    before, decode(data, size, self.chain[layer].plane_bytes), out=block_bytes
                )
            elif is_first:
                # An empty piece changes nothing, but the block still needs the bytes of the base.
                np.copyto(block_bytes, before)
        del self._missing[number]
        self._open[block] -= 1
        # Checksums need the bytes in order, so they follow the blocks without a gap before them.
        while self._complete < len(self._open) and not self._open[self._complete]:
            self._complete += 1
            self._verifier.advance(sum(self._span(self._complete - 1)))

    def _span(self, block: int) -> tuple[int, int]:
        start = block * self.manifest.chunk_bytes
        return start, min(self.manifest.chunk_bytes, self.manifest.size_bytes - start)

    def finish(self) -> Snapshot:
        """Return the snapshot, once complete."""
        assert self.is_complete
        self._verifier.advance(self.manifest.size_bytes)
        return Snapshot(self.manifest, self._memory)
