"""Names of tasks that prove which worker was given what. Pure.

A name is `EPOCH-NUMBER@VERSION:SEAL`. The seal is a keyed hash over the worker's identity and the task's content, all
of which comes back with the result: also one that comes when the lease is with another worker, or after a restart.
"""

import hmac

import msgspec
import xxhash

from prefixrl.common.wire.messages.groups import GroupTask, TaskKind
from prefixrl.common.wire.messages.worker import Prefixes, PrefixTask, Scores, ScoreTask

SEAL_BYTES = 8
Content = tuple[TaskKind, tuple[object, ...]]


def content(message: PrefixTask | ScoreTask | Prefixes | Scores) -> Content:
    """Return what a task asks about. A result and its task have the same content."""
    match message:
        case PrefixTask():
            return message.kind, message.groups
        case Prefixes():
            return message.kind, tuple(
                GroupTask(each.seq, each.prompt, each.seed) for each in message.groups
            )
        case ScoreTask():
            return message.kind, tuple(
                (message.version, message.weights_digest, group) for group in message.groups
            )
        case Scores():
            judged = tuple(
                (each.version, each.weights_digest, each.prefixes) for each in message.groups
            )
            return message.kind, judged


def version_of(task: str) -> int:
    """Return the version that a proved name carries."""
    return int(task.rpartition(":")[0].rpartition("@")[2])


class TaskNames:
    """Names tasks and knows its names again; `epoch` tells the brokers of a run apart."""

    def __init__(self, epoch: str, key: bytes) -> None:
        self._epoch, self._key = epoch, key
        self._seed = int.from_bytes(hmac.digest(key, b"seed", "sha256")[:8], "little")
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0

    def name(self, holder: bytes, version: int, task_content: Content) -> str:
        """Return the name of a new task."""
        self._number += 1
        start = f"{self._epoch}-{self._number}@{version}"
        return f"{start}:{self._seal(start, holder, task_content)}"

    def proves(self, task: str, holder: bytes, answered: Content) -> bool:
        """Return True if this worker was given this content under this name, by a broker of the run."""
        start, _, seal = task.rpartition(":")
        return hmac.compare_digest(seal.encode(), self._seal(start, holder, answered).encode())

    def _seal(self, start: str, holder: bytes, task_content: Content) -> str:
        # SHA-256 alone would take a third of the broker's time where answers are long. Who does not know the seed
        # cannot search for a collision, and sees no hash, only the seal of one.
        fast = xxhash.xxh3_128_digest(self._encoder.encode(task_content), seed=self._seed)
        return hmac.digest(self._key, self._encoder.encode((start, holder, fast)), "sha256")[
            :SEAL_BYTES
        ].hex()
