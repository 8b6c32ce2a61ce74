"""The memory of this process."""

from pathlib import Path

from prefixrl.common.wire.messages.worker import MemoryUse

ROLLUP = Path("/proc/self/smaps_rollup")


def memory_now() -> MemoryUse | None:
    """Return the memory of this process; None where the system does not tell."""
    # The kernel goes through the page table for it: 6 ms per GiB of small pages.
    try:
        lines = ROLLUP.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None  # no such file, no right to read it, no descriptor left: no process is to end for a figure
    size_bytes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if not size_bytes:
        return None
    own_bytes = size_bytes["Private_Clean"] + size_bytes["Private_Dirty"]
    return MemoryUse(resident_bytes=size_bytes["Rss"], own_bytes=own_bytes, share_bytes=size_bytes["Pss"])
