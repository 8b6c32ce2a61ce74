"""A real SLURM cluster on loopback for these tests; without SLURM they fail, and say why."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm.on_slurm import Install, cancel_all, four_nodes, nodes_are_free
from support.runs.run_helper import wait_for


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Path]:
    """Nodes of four CPUs and two GPUs."""
    with four_nodes() as folder:
        yield folder


@pytest.fixture
def cluster(whole_cluster: Path) -> Iterator[Path]:
    """The cluster without a job, before the test and after it."""
    yield whole_cluster
    cancel_all()
    wait_for(nodes_are_free, "an empty cluster", 60)


@pytest.fixture
def daemons(tmp_path: Path) -> Install:
    """Write shell texts as the daemons, or as `prefixrl` itself; the settings with which jobs take them."""

    def install(**texts: str) -> tuple[str, ...]:
        folder = tmp_path / "its bin"
        folder.mkdir()
        for name in ("prefixrl", "prefixrl-learner", "prefixrl-rollout", "prefixrl-scorer"):
            path = folder / name
            path.write_text(
                f"#!/bin/bash\n{texts.get(name.removeprefix('prefixrl-'), 'sleep 3')}\n"
            )
            path.chmod(0o755)
        lines = [f"export PATH='{folder}':$PATH"]
        return (f"slurm.activate={json.dumps(lines)}",)

    return install
