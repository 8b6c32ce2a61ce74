"""A real SLURM cluster on loopback for these tests; without SLURM they fail, and say why."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.on_slurm import cancel_all, nodes_are_free
from support.runs.run_helper import wait_for

SCRIPT = Path(__file__).with_name("mini_cluster.sh")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "unshare")


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Path]:
    """Four nodes of four CPUs and two GPUs that are none; the folder with the cluster's logs."""
    missing = [each for each in NEEDED if shutil.which(each) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(
            f"the tests on SLURM cannot run: missing commands: {', '.join(missing) or 'none'}, user id {os.geteuid()} "
            "(must be 0); `make slurm` installs slurm-wlm and munge as root"
        )
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        started = subprocess.run(["bash", str(SCRIPT), "start", str(folder)], capture_output=True, text=True)
        assert started.returncode == 0, started.stderr
        yield folder
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=False)
        del os.environ["SLURM_CONF"]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(whole_cluster: Path) -> Iterator[Path]:
    """The cluster without a job, before the test and after it."""
    yield whole_cluster
    cancel_all()
    wait_for(nodes_are_free, "an empty cluster", 60)
