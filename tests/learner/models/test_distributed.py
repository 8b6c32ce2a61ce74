"""The place where ranks meet, and the interface from which they talk."""

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from prefixrl.common.errors import ConfigError
from prefixrl.learner.models import distributed

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The meetings of ranks, which are none; no variable stays."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored, whatever is set meanwhile
        del os.environ[name]
    results: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: results.append(options))
    return results


def meet(address: str, **variables: str) -> str | None:
    """The interface that a rank of two takes."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT="29500", **variables)
    distributed._meet("gloo", 1, 2, timedelta(seconds=1))
    return os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_ranks_of_one_host_talk_over_its_loopback(address: str) -> None:
    assert meet(address) == "lo"


def test_ranks_of_several_hosts_talk_from_the_interface_that_leads_to_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(distributed, "towards", lambda host: {"10.98.0.1": "wg0"}.get(host))
    assert meet("10.98.0.1") == "wg0"
    assert (
        "rank 1 of 2 meets the others at 10.98.0.1; gloo on wg0 encrypts nothing" in caplog.messages
    )


def test_a_named_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "towards", lambda host: "wg0")
    assert meet("10.98.0.1", GLOO_SOCKET_IFNAME="eth1") == "eth1"


def test_where_no_way_is_known_gloo_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "towards", lambda host: None)
    assert meet("node7.invalid") is None


@pytest.mark.parametrize(
    ("local_rank", "devices", "index"), [(0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3)]
)
def test_a_rank_takes_the_only_device_it_sees_or_that_of_its_number(
    local_rank: int, devices: int, index: int
) -> None:
    assert distributed.device_index(local_rank, devices) == index


def test_more_ranks_than_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match="LOCAL_RANK = 4, but this process sees 4 CUDA devices: allowed are 0 to 3",
    ):
        distributed.device_index(4, 4)


WITH_A_COLLECTIVE_UNDER_WAY = """
import os
import torch
import torch.distributed as dist
from prefixrl.common.errors import Halted
from prefixrl.common.host.process import no_teardown
from prefixrl.learner.models import distributed

def rank(groups=[]):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.append(dist.group.WORLD)  # as DeepSpeed does: gloo's threads live as long as it
    dist.all_reduce(torch.ones(30_000_000), async_op=True)
    distributed.stop()
    raise Halted("asked to stop")

torch.set_num_threads(1)
codes = []
for _ in range(8):
    if not (child := os.fork()):
        with no_teardown():
            rank()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes == 8 * [Halted.exit_code], codes)
"""


@pytest.mark.slow
def test_a_rank_ends_with_its_own_code_while_gloo_still_holds_a_tensor() -> None:
    command = [sys.executable, "-c", WITH_A_COLLECTIVE_UNDER_WAY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True"), done.stdout + done.stderr
