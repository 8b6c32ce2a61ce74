"""The memory of a process, where the system does not tell it, and what it may still take."""

import resource
from functools import partial
from pathlib import Path

import pytest

from prefixrl.common.host import memory_use
from prefixrl.common.host.memory_use import free_memory_bytes, memory_now
from prefixrl.common.weights import memory


@pytest.mark.parametrize("name", ["", "missing"])
def test_memory_that_cannot_be_read_is_none_and_ends_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_use, "ROLLUP", tmp_path / name)
    assert memory_now() is None


@pytest.mark.skipif(
    not memory_use.ROLLUP.exists(), reason="the system does not tell the memory of a process"
)
def test_a_process_without_descriptors_left_goes_on_without_its_memory() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert memory_now() is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        actual = memory_now()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert actual is None


MIB = 2**20
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file"
V2 = "memory.max", "memory.current", "active_file"
GROUPS: dict[str, tuple[str, tuple[str, str, str], dict[str, tuple[object, int, int]], int]] = {
    "no control groups": ("", V2, {}, 1000),
    "version 2": ("0::/job", V2, {"job": (300 * MIB, 250, 50), "": ("none at the top", 0, 0)}, 100),
    "version 2, the group above": (
        "0::/job/step",
        V2,
        {"job": (90 * MIB, 20, 0), "job/step": ("max", 20, 0)},
        70,
    ),
    "version 2, no limit": ("0::/job", V2, {"job": ("max", 900, 0)}, 1000),
    "more used than allowed": ("0::/job", V2, {"job": (10 * MIB, 20, 0)}, 0),
    "version 1": (
        "4:memory:/job\n0::/",
        V1,
        {"memory/job": (60 * MIB, 20, 10), "memory": (2**63 - 4096, 9, 0)},
        50,
    ),
    "version 1, in a container": ("4:memory:/docker/1f", V1, {"memory": (80 * MIB, 20, 0)}, 60),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_version_of_weights_has_to_fit_the_limits_of_the_control_groups(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, names, groups, free_mib = GROUPS[case]
    files = {
        "proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n",
        "proc/self/cgroup": own,
    }
    for folder, (limit, used_mib, pages_mib) in groups.items():
        texts = str(limit), str(used_mib * MIB), f"anon 5\n{names[2]} {pages_mib * MIB}\n"
        held = zip((*names[:2], "memory.stat"), texts, strict=True)
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in held}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == free_mib * MIB
    monkeypatch.setattr(memory, "free_memory_bytes", partial(free_memory_bytes, tmp_path))
    with pytest.raises(
        OSError, match=rf"a version takes {free_mib + 1:,} MiB, {free_mib:,} MiB are free"
    ):
        memory.MemoryFiles().take_memory((free_mib + 1) * MIB)
