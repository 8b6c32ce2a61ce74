"""Workers with the simulated engine sample, score and install weights, and never load torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.simulated import PROBE_LOGPROBS, learner, simulated_run, take_batch
from prefixrl.learner.processes.servers import Servers
from support.fakes import wait_until


@pytest.mark.slow
def test_a_rollout_and_a_scorer_with_simulated_engines_need_no_torch(tmp_path: Path) -> None:
    config = simulated_run(tmp_path, 4, prefix_s=0.001, scoring_s=0.001)
    directory = Path(config.directory)
    servers = Servers(config, directory, 0)
    workers = [
        subprocess.Popen([sys.executable, "-m", f"prefixrl.{role}", "--run", str(directory)])
        for role in ("rollout", "scorer")
    ]
    try:
        with learner(servers, config) as (client, publisher):
            take_batch(client, 0)
            client.iteration_done(0, 1)
            publisher.publish(1, {"weight": torch.ones(4)}.items(), PROBE_LOGPROBS)
            wait_until(
                lambda: 1 in [each.version for each in client.status().workers],
                "an installation",
                60.0,
            )
            take_batch(client, 1)
            maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in workers]
        assert [each.wait(60) for each in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        servers.close()
    assert all("numpy" in each for each in maps), "the files that a process has loaded stand there"
    assert not any("libtorch" in each for each in maps)
