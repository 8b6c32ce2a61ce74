"""Signs of life for systemd (`Type=notify`): datagrams to NOTIFY_SOCKET; without one nothing is sent."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

STATUS_EVERY_S = 1.0
STOP_STEP_S = 600.0
"""Longest step of work during a stop: the time until the next sign of life."""
LOOK_S = 1.0
SEND_S, READY_SEND_S = 1.0, 30.0
"""Longest wait for a manager whose queue is full, as it is for a moment while it reloads."""


class Service:
    """This process as systemd sees it."""

    def __init__(
        self,
        environment: MutableMapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take systemd's variables out of the environment, so that no child speaks for this process."""
        self._stopped = stopped
        self._address = environment.pop("NOTIFY_SOCKET", "")
        watched = environment.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        microseconds = environment.pop("WATCHDOG_USEC", "")
        self._watchdog_s = int(microseconds) / 1e6 if watched and microseconds.isdigit() else 0.0
        self._clock = clock
        self._status = ""
        self._status_s = 0.0
        self._fed_s = -self._watchdog_s
        self._fed_at = -1
        self._is_patient = self._is_stopping = False
        self._extended_s = 0.0

    def ready(self, status: str) -> None:
        """Say that the process serves now; the watchdog begins here."""
        self._fed_s = self._clock()
        self._send(f"READY=1\nSTATUS={status}", READY_SEND_S)

    def status(self, text: str) -> None:
        """Say what the process does, when that has changed; at most once a second."""
        now_s = self._clock()
        if text != self._status and now_s - self._status_s >= STATUS_EVERY_S:
            self._status = text
            self._status_s = now_s
            self._send(f"STATUS={text}")

    def be_patient(self, most_s: float) -> None:
        """Let the watchdog wait so long for progress, once: loading, for example, has no loop."""
        if self._watchdog_s:
            self._is_patient = True
            self._send(f"WATCHDOG_USEC={int(most_s * 1e6)}")

    def alive(self, progress: int | None) -> None:
        """Feed the watchdog unless the `progress` of open work stands still; None: none is open."""
        now_s = self._clock()
        if not self._watchdog_s or (
            now_s - self._fed_s < self._watchdog_s / 2 and not self._is_patient
        ):
            return
        if progress is None or progress != self._fed_at:
            usual = f"WATCHDOG_USEC={int(self._watchdog_s * 1e6)}\n" if self._is_patient else ""
            if self._send(f"{usual}WATCHDOG=1"):
                self._fed_s = now_s
                self._fed_at = -1 if progress is None else progress
                self._is_patient = False

    @contextmanager
    def patience(self, most_s: float) -> Iterator[None]:
        """Let work without a loop, a save for example, take so long, also if a stop comes meanwhile."""
        if not self._address:
            yield
            return
        self.be_patient(most_s)
        deadline_s = self._clock() + most_s
        over = threading.Event()
        thread = threading.Thread(
            target=self._await_stop, args=(deadline_s, over), name="patience", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.alive(None)

    def _await_stop(self, deadline_s: float, over: threading.Event) -> None:
        while not self._stopped():
            if over.wait(LOOK_S):
                return
        self.stopping()
        self._extend(max(0.0, deadline_s - self._clock()))

    def progressed(self) -> None:
        """Note that a step of the work ended: alive, and worth waiting for if a stop was asked for."""
        self.alive(None)
        if self._stopped():
            self.stopping()
        if self._is_stopping and self._clock() - self._extended_s >= LOOK_S:
            self._extend(STOP_STEP_S)

    def _extend(self, by_s: float) -> None:
        """Move the end of a stop's patience; systemd ignores what would bring it nearer."""
        self._extended_s = self._clock()
        self._send(f"EXTEND_TIMEOUT_USEC={int(by_s * 1e6)}")

    def stopping(self) -> None:
        """Say, once, that the process is about to end."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1")

    def _send(self, text: str, patience_s: float = SEND_S) -> bool:
        """Send lines; return False where the manager is gone or does not read, which ends nothing."""
        if not self._address:
            return False
        # A name that begins with @ stands for the abstract namespace, whose names begin with a zero byte.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.settimeout(patience_s)
            try:
                link.sendto(text.encode(), address)
            except OSError:
                return False
        return True
