"""The end of a wait of the learner: a stop that was asked for, or a server that ended for good."""

from collections.abc import Callable
from typing import Protocol

from prefixrl.common.errors import Halted, TrainingFault
from prefixrl.common.host.service import Service


class ServerCheck(Protocol):
    """A process or thread whose end makes a wait for it useless."""

    def check(self) -> None:
        """Raise the error that ends the wait, if it ended."""


class StopSignal:
    """The stop of one learner process, and the servers that its waits depend on.

    Every wait asks it turn by turn. So each question is a sign of life for the service manager, too.
    """

    def __init__(
        self,
        requested: Callable[[], bool] = lambda: False,
        service: Service | None = None,
        servers: ServerCheck | None = None,
    ) -> None:
        """`requested`: True once a signal asked this process to stop."""
        self._requested = requested
        self._service = service
        self._servers = servers
        self.is_halting = False
        """True once the operator wants the run to stop, by an answer about an evaluation."""

    def beside(self, servers: ServerCheck) -> "StopSignal":
        """Return the same stop for a wait that depends on other servers."""
        return StopSignal(self._requested, self._service, servers)

    def is_requested(self) -> bool:
        """Return True once this process was asked to stop; tell the service manager either way."""
        is_requested = self._requested()
        if self._service is not None:
            self._service.alive(None)
            if is_requested:
                self._service.stopping()
        return is_requested

    def check_servers(self) -> None:
        """Raise PeerLost, or UserError, if a server ended for good."""
        if self._servers is not None:
            self._servers.check()

    def end_start(self) -> None:
        """Raise Halted if a stop was asked for while the servers of the run start."""
        if self.is_requested():
            raise Halted(
                "stopped as asked while the servers of the run began; everything is as it was, start it again"
            )

    def end_disk_wait(self) -> None:
        """Raise TrainingFault if a stop was asked for while the disk is full."""
        if self.is_requested():
            raise TrainingFault(
                "asked to stop while the disk is full: neither this nor a checkpoint can be written; iterations "
                "after the newest checkpoint are trained again"
            )

    def end_judging(self, iteration: int) -> None:
        """Raise if a wait after the last of `iteration` iterations is useless: Halted, or as `check_servers`."""
        if self.is_requested() or self.is_halting:
            raise halted(iteration)
        self.check_servers()


NO_STOP = StopSignal()
"""The stop of a part that nobody stops."""


def halted(iteration: int) -> Halted:
    """Return the error that ends a stopped rank; the newest checkpoint is of this iteration."""
    return Halted(
        f"stopped as asked after {iteration} iterations, not finished; everything is saved, start it again to resume"
    )
