"""The rank of this process, and the supervisor of several behind `--nproc-per-node`.

torchrun, deepspeed      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set already
srun                     SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, the first node of SLURM_STEP_NODELIST
--nproc-per-node N       the supervisor starts N ranks on this machine and ends all of them when one dies
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prefixrl.common.errors import ConfigError, Halted, PeerLost
from prefixrl.common.host.process import PARENT_VARIABLE, end_children

log = logging.getLogger(__name__)

FIRST_SLURM_PORT = 20_000
SLURM_PORTS = 10_000
STOP_S = 60.0
KILL_AFTER_LOSS_S = 5.0
TICK_S = 0.1


class RankInfo(NamedTuple):
    """This process among the learner's ranks."""

    rank: int
    ranks: int
    local_rank: int

    def environment(self, address: str, port: int) -> dict[str, str]:
        """Return the variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def rank_info(environment: Mapping[str, str]) -> tuple[RankInfo, dict[str, str]]:
    """Find this process's rank and the variables torch.distributed lacks; raise ConfigError."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        return RankInfo(rank, ranks, local), {}
    # Set by srun for its step; a batch script has SLURM_PROCID and SLURM_NTASKS too, but is one process.
    if "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        info = RankInfo(
            _number(environment, "SLURM_PROCID"),
            _number(environment, "SLURM_STEP_NUM_TASKS"),
            _local_rank(environment),
        )
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        # Every rank must name the same port without talking: a function of the job.
        port = FIRST_SLURM_PORT + _number(environment, "SLURM_JOB_ID", 0) % SLURM_PORTS
        return info, info.environment(first_node(nodes), port)
    return RankInfo(0, 1, 0), {}


def _local_rank(environment: Mapping[str, str]) -> int:
    """Return the index of a task's GPU among the visible GPUs: all of its node, or its own."""
    local = _number(environment, "SLURM_LOCALID", 0)
    devices = [
        each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()
    ]
    return local % len(devices) if devices else local


def first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list (`node[03-05,9],other`), or raise ConfigError."""
    # A name may have several brackets and go on after them: rack[1-2]-node[03,07]-ib.
    match = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+", nodes)
    if match is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST = {nodes!r} names no host; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE instead"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"environment variable {name} = {text!r} is no number")
    return int(text)


def supervise(
    command: list[str],
    ranks: int,
    stopped: Callable[[], bool],
    module: str = "prefixrl.learner",
) -> None:
    """Run `module` once per rank on this machine until all are done; raises PeerLost, Halted, SystemExit."""
    with socket.socket() as reserved_socket:
        # Bound until the ranks end: another process would get a free port while they load torch. Rank 0 listens there.
        reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved_socket.bind(("127.0.0.1", 0))
        places = [
            RankInfo(rank, ranks, rank).environment("127.0.0.1", reserved_socket.getsockname()[1])
            for rank in range(ranks)
        ]
        program = [sys.executable, "-m", module, *command]
        parent = {PARENT_VARIABLE: str(os.getpid())}
        environments = [
            _for_rank(rank, os.environ) | parent | place for rank, place in enumerate(places)
        ]
        children = [subprocess.Popen(program, env=each) for each in environments]
        try:
            _watch(children, stopped)
        finally:
            end_children(children, KILL_AFTER_LOSS_S)


def _for_rank(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: rank 0 speaks to systemd for all of them."""
    unset = {"WATCHDOG_PID"} if rank == 0 else {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}
    return {name: value for name, value in environment.items() if name not in unset}


def _watch(children: "list[subprocess.Popen[bytes]]", stopped: Callable[[], bool]) -> None:
    is_stopping = False
    while not is_stopping and any(child.poll() is None for child in children):
        _check(children, is_stopping)
        time.sleep(TICK_S)
        is_stopping = stopped()
    if is_stopping:
        end_children(children, STOP_S)
    _check(children, is_stopping)
    if any(child.returncode for child in children):
        raise Halted("the learner's ranks were stopped as asked, the run is not finished")


def _check(children: "list[subprocess.Popen[bytes]]", is_stopping: bool) -> None:
    """Raise for a lost rank; ranks that halt one after the other are not lost."""
    fine = {0, Halted.exit_code}
    if is_stopping:
        fine.add(-signal.SIGTERM)  # stopped before its handler was installed
    for rank, child in enumerate(children):
        code = child.poll()
        if code is None or code in fine:
            continue
        if code > 0:
            log.error("learner rank %d (pid %d) ended with exit code %d", rank, child.pid, code)
            raise SystemExit(code)
        raise PeerLost(f"learner rank {rank} (pid {child.pid}) was killed by signal {-code}")
