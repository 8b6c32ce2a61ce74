"""The traffic of a bridge: recorded by tcpdump, put together stream by stream, and searched for plain text."""

import re
import signal
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.hosts.network import Namespace
from support.runs.run_helper import wait_for

BUFFER_KIB = 65536
ETHERNET = 1
HEAD_BYTES = 8
"""Bytes of a piece by which it is looked for."""
LEAST_BYTES = 12
"""Shorter pieces come up by chance."""
WEIGHT_PIECE_BYTES = 64
LEAST_VARIETY = 24
"""Different bytes in a piece of weights; those with fewer (zeros, ones) say nothing."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Flow = tuple[str, int, str, int]
"""Sender and receiver, each with its port."""


class Recorder:
    """A tcpdump on the bridge, which sees every packet between the hosts."""

    def __init__(self, switch: Namespace, path: Path) -> None:
        self.path, self._log = path, path.with_suffix(".log")
        command = [
            "tcpdump",
            "-i",
            "br0",
            "-s",
            "0",
            "-n",
            "-U",
            "-B",
            str(BUFFER_KIB),
            "-Z",
            "root",
            "-w",
            str(path),
        ]
        self._process = switch.start(command, self._log)
        wait_for(lambda: "listening on" in self._log.read_text(), "the start of tcpdump", 20.0)

    def stop(self) -> Path:
        """End the recording; its file."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20.0)
        said = self._log.read_text()
        assert re.search(r"^0 packets dropped by kernel", said, re.MULTILINE), said
        return self.path


@dataclass(frozen=True)
class Packet:
    """The content of a TCP segment or UDP datagram."""

    flow: Flow
    sequence: int | None
    """None of a datagram."""
    content: bytes


def packets(path: Path) -> Iterator[Packet]:
    """All packets of a recording with content."""
    data = memoryview(path.read_bytes())
    magic, _, _, _, _, _, kind = struct.unpack_from("<IHHiIII", data)
    assert magic == 0xA1B2C3D4 and kind == ETHERNET
    at = 24
    while at < len(data):
        _, _, size, whole = struct.unpack_from("<IIII", data, at)
        assert size == whole, "a packet was cut"
        frame, at = data[at + 16 : at + 16 + size], at + 16 + size
        if bytes(frame[12:14]) == b"\x08\x00" and (packet := _packet(frame[14:])):
            yield packet


def _packet(ip: memoryview) -> Packet | None:
    begin, end, protocol = (ip[0] & 15) * 4, int.from_bytes(ip[2:4]), ip[9]
    if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
        return None
    inner = ip[begin : end or len(ip)]  # a segment of more than 64 KiB has no length here
    sender, receiver = (socket.inet_ntoa(bytes(ip[place : place + 4])) for place in (12, 16))
    flow = (sender, int.from_bytes(inner[0:2]), receiver, int.from_bytes(inner[2:4]))
    if protocol == socket.IPPROTO_UDP:
        return Packet(flow, None, bytes(inner[8:]))
    content = bytes(inner[(inner[12] >> 4) * 4 :])
    return Packet(flow, int.from_bytes(inner[4:8]), content) if content else None


def streams(path: Path) -> dict[Flow, bytes]:
    """The bytes that were sent from one place to another, in the order in which it was read there."""
    segments: dict[Flow, list[tuple[int, bytes]]] = defaultdict(list)
    first: dict[Flow, int] = {}
    for number, each in enumerate(packets(path)):
        if each.sequence is None:
            segments[each.flow].append((number << 33, each.content))
        else:
            began = first.setdefault(each.flow, each.sequence)
            segments[each.flow].append(((each.sequence - began + 2**31) % 2**32, each.content))
    return {flow: _joined(found) for flow, found in segments.items()}


def _joined(segments: list[tuple[int, bytes]]) -> bytes:
    """Segments in their order, each byte once however often it was sent."""
    parts: list[bytes] = []
    reached = -1
    for at, content in sorted(segments):
        parts.append(content[max(0, reached - at) :] if reached >= 0 else content)
        reached = max(reached, at + len(content))
    return b"".join(parts)


class Pieces:
    """Pieces of plain text by kind, looked for at every byte of many streams at once."""

    def __init__(self, by_kind: Mapping[str, Iterable[bytes]]) -> None:
        self._kinds: dict[bytes, list[tuple[bytes, str]]] = defaultdict(list)
        for kind, pieces in by_kind.items():
            for piece in set(pieces):
                assert len(piece) >= LEAST_BYTES, (kind, piece)
                self._kinds[piece[:HEAD_BYTES]].append((piece, kind))
        heads = np.frombuffer(b"".join(self._kinds), dtype="<u8")
        self._heads = np.sort(heads)
        self._is_possible = np.zeros(2**24, dtype=bool)
        self._is_possible[_hashed(heads)] = True

    def count(self, stream: bytes) -> Counter[str]:
        """Places of a stream at which a piece stands, by kind."""
        result: Counter[str] = Counter()
        for shift in range(HEAD_BYTES):
            whole = max(0, len(stream) - shift) // HEAD_BYTES
            words = np.frombuffer(stream[shift : shift + whole * HEAD_BYTES], dtype="<u8")
            near = np.flatnonzero(self._is_possible[_hashed(words)])
            for place in near[np.isin(words[near], self._heads)]:
                at = int(place) * HEAD_BYTES + shift
                result.update(
                    kind
                    for piece, kind in self._kinds[stream[at : at + HEAD_BYTES]]
                    if stream[at : at + len(piece)] == piece
                )
        return result


def _hashed(words: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    return (words * _FACTOR) >> np.uint64(40)


def weight_pieces(path: Path) -> Iterator[bytes]:
    """The pieces of a file of weights that are not nearly all the same byte."""
    content = path.read_bytes()
    for start in range(0, len(content) - WEIGHT_PIECE_BYTES + 1, WEIGHT_PIECE_BYTES):
        piece = content[start : start + WEIGHT_PIECE_BYTES]
        if len(set(piece)) >= LEAST_VARIETY:
            yield piece
