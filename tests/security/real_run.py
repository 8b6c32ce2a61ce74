"""A run as its users have it: servers, a rollout and a scorer are processes, with engines that take the declared times.

The test is its learner, and reads what the servers log.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.simulated import PROBE, PROBE_LOGPROBS, daemons, simulated_run, take_batch
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.address import address_in
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.weights.publish import Publisher
from support.fakes import end, endpoint_of, wait_until
from support.keys import give_keys

SERVERS = """
import sys, threading
from pathlib import Path
from prefixrl.common.config.load import from_json
from prefixrl.learner.processes.servers import Servers
directory = Path(sys.argv[1])
servers = Servers(from_json((directory / "config.json").read_text()), directory, 0)
(directory / "started").touch()
threading.Event().wait()
"""
MIB = 2**20
MOST_MIB = 300
STALL_S = 4.0


@dataclass
class RealRun:
    """A run that goes on."""

    config: RunConfig
    directory: Path
    log_file: Path
    servers: psutil.Process
    client: BrokerClient
    publisher: Publisher
    iteration: int = 0

    @property
    def endpoint(self) -> str:
        return endpoint_of(self.config)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def server(self, title: str) -> psutil.Process:
        (result,) = [each for each in self.servers.children() if title in each.cmdline()[0]]
        return result

    @property
    def broker_mib(self) -> float:
        """The most memory that the broker ever held."""
        pid = self.server("prefixrl-broker").pid
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024

    def logs(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until the servers have logged a text."""
        wait_until(lambda: text in self.log, f"a line with {text!r}", timeout_s)

    def goes_on(self) -> None:
        """The honest workers finish an iteration, of the same servers, which are well."""
        self.train()
        assert "Traceback" not in self.log and "starting it again" not in self.log, self.log[-4000:]
        assert self.broker_mib < MOST_MIB

    def train(self, before_new_groups: Callable[[], None] = lambda: None) -> None:
        """Wait for the next batch and finish it; then there is room for new groups."""
        take_batch(self.client, self.iteration)
        before_new_groups()
        self.client.iteration_done(self.iteration, self.iteration + 1)
        self.iteration += 1
        self.publisher.publish(self.iteration, {"weight": torch.zeros(4)}.items(), PROBE_LOGPROBS)


@contextmanager
def real_run(folder: Path) -> Iterator[RealRun]:
    """A run of 200 iterations, after its first one."""
    config = simulated_run(folder, 200, 0.002, 0.01, broker={"silence_s": 30.0, "stall_s": STALL_S})
    directory, log_file = Path(config.directory), folder / "log"
    give_keys(directory)
    with log_file.open("wb") as log:
        servers = subprocess.Popen([sys.executable, "-c", SERVERS, str(directory)], stderr=log)
    try:
        wait_until((directory / "started").exists, "the servers' start")
        client = BrokerClient(address_in(directory, "rank"))
        publisher = Publisher(address_in(directory, "rank"), directory / "weights", PROBE, False)
        publisher.publish(0, {"weight": torch.zeros(4)}.items(), PROBE_LOGPROBS)
        with daemons("rollout", 1, directory), daemons("scorer", 1, directory):
            run = RealRun(
                config, directory, log_file, psutil.Process(servers.pid), client, publisher
            )
            run.goes_on()
            yield run
        client.close()
        publisher.close()
    finally:
        end(servers)
