"""A worker's fetcher in a process of its own, for tests that kill, stop and starve it; forked from a warm server."""

import multiprocessing
import os
import resource
import signal
import time
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prefixrl.common.weights.folders import prune
from prefixrl.common.weights.snapshot import describe
from prefixrl.rollout import staging
from prefixrl.rollout.weights import Fetcher
from support.keys import ALONE, source

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["prefixrl.rollout.weights"])  # torch, above all


def pull(
    endpoint: str,
    versions: list[int],
    killed_after: int | None,
    file_bytes: int | None,
    pause_s: float,
    pipe: "Connection[Any, Any]",
) -> None:
    """Fetch versions in turn; report version, the manifest's digest, that of the tensors handed out, and retries.

    Args:
        killed_after: SIGKILL itself when so many pieces have arrived.
        file_bytes: no file may be larger, until two pulls have failed.
        pause_s: between pieces; "begun" is reported at the first.
    """
    count, put = 0, staging.Staging.put

    def counted(self: staging.Staging, number: int, frames: list[memoryview]) -> None:
        nonlocal count
        if count == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if pause_s and not count:
            pipe.send("begun")
        time.sleep(pause_s)
        count += 1
        put(self, number, frames)

    staging.Staging.put = counted  # type: ignore[method-assign]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    fetcher = Fetcher(source(endpoint), ALONE)
    for version in versions:
        fetcher.want_version(version, "")
        while (staged := fetcher.take_snapshot()) is None:
            time.sleep(0.001)
            if fetcher.counts.retries >= 2 and file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        result = describe(staged.version, staged.tensors).digest
        pipe.send((staged.version, staged.manifest.digest, result, fetcher.counts.retries))


class Puller:
    """The process, which is gone after the block; see `pull` for the options."""

    def __init__(
        self,
        endpoint: str,
        versions: list[int],
        killed_after: int | None = None,
        file_bytes: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self._pipe, self._end = WARM.Pipe()
        options = (endpoint, versions, killed_after, file_bytes, pause_s, self._end)
        self.process = WARM.Process(target=pull, args=options, daemon=True)

    def __enter__(self) -> "Puller":
        self.process.start()
        self._end.close()
        return self

    def hears(self, timeout_s: float = 60.0) -> Any:
        """Return its next report; raise EOFError if it died first."""
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"nothing from the puller within {timeout_s:g} s")
        return self._pipe.recv()

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


numbers = count(1)


def fresh(folder: Path) -> int:
    """A version higher than any that a test before used; no snapshot is there."""
    prune(folder, set())
    return 100 * next(numbers)
