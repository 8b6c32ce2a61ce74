"""Processes of this host, which may end while they are looked at."""

from contextlib import suppress

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """True for a process that still runs; a zombie has ended."""
    with suppress(psutil.NoSuchProcess):
        known = psutil.Process(process) if isinstance(process, int) else process
        return known.is_running() and known.status() != psutil.STATUS_ZOMBIE
    return False


def titled(pid: int, title: str) -> list[psutil.Process]:
    """The processes below another one that have a title, for example prefixrl-broker."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] * (process.cmdline()[:1] == [title])
    return found
