"""Processes of this host, which may end while they are looked at."""

from collections.abc import Sequence
from contextlib import suppress

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """True for a process that still runs; a zombie has ended."""
    with suppress(psutil.NoSuchProcess):
        known = psutil.Process(process) if isinstance(process, int) else process
        return known.is_running() and known.status() != psutil.STATUS_ZOMBIE
    return False


def command_line(process: psutil.Process) -> Sequence[str]:
    """The arguments of a process, its title first; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return ()


def titled(pid: int, title: str) -> list[psutil.Process]:
    """The processes below another one that have a title, for example prefixrl-broker."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if list(command_line(process)[:1]) == [title]]
