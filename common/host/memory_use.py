"""The memory of this process, and what it may still take."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefixrl.common.wire.messages.worker import MemoryUse

ROLLUP = Path("/proc/self/smaps_rollup")


def memory_now() -> MemoryUse | None:
    """Return the memory of this process; None where the system does not tell."""
    # The kernel goes through the page table for it: 6 ms per GiB of small pages.
    try:
        kib = _numbers(ROLLUP, first=1)
    except OSError:
        return None  # no such file, no right to read it, no descriptor left: no process is to end for a figure
    if not kib:
        return None
    return MemoryUse(
        resident_bytes=1024 * kib["Rss:"],
        own_bytes=1024 * (kib["Private_Clean:"] + kib["Private_Dirty:"]),
        share_bytes=1024 * kib["Pss:"],
    )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return what may still be taken: of the machine, and within the limits of this process's control groups.

    Pages of files count as free: the kernel drops them first. `root` holds proc and sys.
    """
    free_bytes = [_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024]
    with suppress(OSError):  # no such file: a system without control groups
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            controllers, path = line.split(":", 2)[1:]
            if not controllers:
                free_bytes += _free_in_groups(
                    root / "sys/fs/cgroup", path, "memory.max", "memory.current", ""
                )
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
                free_bytes += _free_in_groups(root / "sys/fs/cgroup/memory", path, *names)
    return max(0, min(free_bytes))


def _free_in_groups(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Yield what a control group and each above it leave; in a container the upper ones may be out of sight."""
    below = top / path.strip("/")
    for folder in (below, *below.parents):
        # The word `max` in place of a number is no limit, and the top has none.
        with suppress(OSError, ValueError):
            most, used = (
                int((folder / name).read_text(encoding="ascii")) for name in (limit, usage)
            )
            pages = _numbers(folder / "memory.stat")
            kinds = (f"{prefix}inactive_file", f"{prefix}active_file")
            yield most - used + sum(pages.get(kind, 0) for kind in kinds)
        if folder == top:
            return


def _numbers(file: Path, first: int = 0) -> dict[str, int]:
    """Return the numbers behind the first word of each line, from line `first` on."""
    lines = file.read_text(encoding="ascii").splitlines()[first:]
    return {words[0]: int(words[1]) for words in map(str.split, lines)}
