"""The messages of one turn of the broker that rest on the journal, and the order in which they may leave.

    records of the turn ──▶ journal, synced ──▶ acknowledgements ──▶ tasks ──▶ batches
                               │
                               └─ its disk is full: nothing leaves. Results are sent again, ranks ask again.

A worker forgets a result that was acknowledged, so the journal must hold it first. A task comes from the state that
these results led to. A batch is last: its description takes the longest to send.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.wire.messages.learner import FromBroker
from prefixrl.common.wire.messages.worker import Ack
from prefixrl.common.wire.transport import Payload

Answer = tuple[FromBroker, list[Payload]]


class Outgoing(NamedTuple):
    """One message to one peer."""

    peer: bytes
    message: FromBroker
    payload: list[Payload]


class Outbox:
    """Messages that wait for the journal."""

    def __init__(self) -> None:
        self.acks: list[Outgoing] = []
        self.tasks: list[Outgoing] = []
        """Tasks, and revocations of tasks."""
        self.batches: list[Outgoing] = []

    def add_ack(self, peer: bytes, task: str) -> None:
        """Acknowledge a result of a task once the journal holds it."""
        self.acks.append(Outgoing(peer, Ack(task), []))

    def add_task(self, peer: bytes, message: FromBroker) -> None:
        """Send a task, or revoke one."""
        self.tasks.append(Outgoing(peer, message, []))

    def add_batches(self, answers: Mapping[bytes, Answer]) -> None:
        """Answer ranks that asked for a batch."""
        self.batches += [Outgoing(peer, *answer) for peer, answer in answers.items()]

    def after_sync(self) -> Iterator[Outgoing]:
        """Yield everything in its order and forget it; only for a journal that holds the records of this turn."""
        acks, tasks, batches = self.acks, self.tasks, self.batches
        self.acks, self.tasks, self.batches = [], [], []
        yield from acks
        if acks:
            crash_point("journal.acknowledged")
        yield from tasks
        yield from batches
