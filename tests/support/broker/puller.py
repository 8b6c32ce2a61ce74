"""Pulls of a worker's fetcher, for a process that a test kills, stops and starves; light to import."""

import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from prefixrl.common.weights.snapshot import describe
from prefixrl.rollout import staging
from prefixrl.rollout.weights import Fetcher
from support.keys import ALONE, source


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
