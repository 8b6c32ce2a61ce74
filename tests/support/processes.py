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
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if has_title(process, title)]


def has_title(process: psutil.Process, title: str) -> bool:
    """True for a process that has a title and still runs."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[:1] == [title]
    return False
