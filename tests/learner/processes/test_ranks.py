"""The supervisor of ranks: what their ends together mean."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from prefixrl.common.errors import ConfigError, Halted, PeerLost
from prefixrl.learner.processes.ranks import RankInfo, _for_rank, _watch, first_node, rank_info
from support.fakes import end

HALTS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(flush=True)
time.sleep(600)
"""
FINISHES = HALTS.replace("143", "0")
DEAF = "print(flush=True); import time; time.sleep(600)"


def ends(code: int, after_s: float = 0.0) -> str:
    return f"print(flush=True); import sys, time; time.sleep({after_s}); sys.exit({code})"


@contextlib.contextmanager
def ranks(*scripts: str) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Processes in place of ranks, each as far as its first line; none outlives the block."""
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        for script in scripts
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            process.stdout.close()
        yield started
    finally:
        for process in started:
            end(process)


def is_asked() -> bool:
    return True


def is_not_asked() -> bool:
    return False


def test_ranks_that_halt_one_after_another_are_not_lost() -> None:
    with ranks(ends(143), ends(143, after_s=1.0), ends(0)) as children, pytest.raises(Halted):
        _watch(children, is_not_asked)


@pytest.mark.parametrize("others", [HALTS, FINISHES, DEAF])
def test_ranks_that_are_asked_to_stop_halt(others: str) -> None:
    with ranks(HALTS, others) as children, pytest.raises(Halted):
        _watch(children, is_asked)


def test_ranks_that_had_finished_when_they_were_asked_are_finished() -> None:
    with ranks(FINISHES, FINISHES) as children:
        _watch(children, is_asked)
    with ranks(ends(0), ends(0)) as children:
        _watch(children, is_not_asked)


def test_a_rank_that_was_killed_is_lost() -> None:
    with ranks(DEAF, DEAF) as children:
        threading.Timer(0.5, children[1].send_signal, [signal.SIGTERM]).start()
        with pytest.raises(PeerLost, match=r"learner rank 1 .* was killed by signal 15"):
            _watch(children, is_not_asked)


def test_a_rank_that_failed_gives_its_exit_code() -> None:
    with ranks(ends(2), ends(2)) as children, pytest.raises(SystemExit) as failed:
        _watch(children, is_not_asked)
    assert failed.value.code == 2


def test_the_first_rank_alone_speaks_to_systemd_for_all() -> None:
    given = {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "7",
        "HOME": "/root",
    }
    assert _for_rank(0, given) == {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "1",
        "HOME": "/root",
    }
    assert _for_rank(1, given) == {"HOME": "/root"}


SECOND_NODE = {
    "SLURM_JOB_ID": "7012345",
    "SLURM_JOB_NODELIST": "gpu[03-09]",
    "SLURM_STEP_NODELIST": "gpu[05,07]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
"""A task of a step of eight on two nodes."""


def test_a_task_of_a_step_is_a_rank_and_all_name_the_same_meeting_point() -> None:
    info, missing = rank_info(SECOND_NODE)
    assert info == RankInfo(6, 8, 2)
    assert missing == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "MASTER_ADDR": "gpu05",
        "MASTER_PORT": "22345",
    }
    _, of_another = rank_info(SECOND_NODE | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert {key: of_another[key] for key in ("MASTER_ADDR", "MASTER_PORT")} == {
        key: missing[key] for key in ("MASTER_ADDR", "MASTER_PORT")
    }


@pytest.mark.parametrize(
    ("seen", "local_rank"),
    [("0,1,2,3", 2), ("2", 0), ("GPU-5e1f", 0), ("4,5", 0), ("", 2), ("0,1,2", 2)],
)
def test_a_rank_takes_a_gpu_that_its_task_can_see(seen: str, local_rank: int) -> None:
    info, missing = rank_info(SECOND_NODE | {"CUDA_VISIBLE_DEVICES": seen})
    assert (info.local_rank, missing["LOCAL_RANK"]) == (local_rank, str(local_rank))


def test_variables_of_a_launcher_go_before_those_of_the_step_it_runs_in() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert rank_info(SECOND_NODE | torchrun) == (RankInfo(1, 2, 1), {})


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_a_process_outside_a_step_and_a_step_of_one_task_are_one_rank(
    variables: dict[str, str],
) -> None:
    assert rank_info(variables) == (RankInfo(0, 1, 0), {})
    assert rank_info(variables | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == (
        RankInfo(0, 1, 0),
        {},
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        pytest.param("n1", "n1", id="one node"),
        pytest.param("n1,n2", "n1", id="two nodes"),
        pytest.param("node[03-05,9],other", "node03", id="numbers with zeros"),
        pytest.param("a-b.site.org,c", "a-b.site.org", id="a name with dots"),
        pytest.param("n[7,1-3]-ib0,n4", "n7-ib0", id="text behind the numbers"),
        pytest.param("rack[1-2]node[08,11]", "rack1node08", id="two brackets"),
    ],
)
def test_the_first_node_is_read_from_a_list_in_brackets(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",n1", "[1-2"])
def test_a_list_without_a_node_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="names no host; set MASTER_ADDR"):
        first_node(nodes)
