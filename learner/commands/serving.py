"""The start of a process that asks for answers: its plan, a broker that trains nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from prefixrl.common.config.learner import LogConfig
from prefixrl.common.config.load import from_json, import_functions
from prefixrl.common.config.run import RunConfig
from prefixrl.common.evaluation.plans import PLAN_FILE, CheckpointPlan
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes.servers import Servers

Plan = TypeVar("Plan", bound=CheckpointPlan)


def read_plan(directory: Path, kind: type[Plan]) -> tuple[Plan, RunConfig]:
    """Return the plan in a directory and its config, whose functions are imported."""
    plan = msgspec.json.decode((directory / PLAN_FILE).read_bytes(), type=kind)
    config = from_json(plan.config, f"the plan in {directory}")
    import_functions(config)
    # The run that is judged may go on, on the same host: its ports are taken.
    return plan, config.model_copy(update={"log": LogConfig()})


@contextmanager
def serving(config: RunConfig) -> Iterator[tuple[BrokerClient, Callable[[], None]]]:
    """Run a broker that trains nothing; yield a client and a check to call while waiting.

    The check raises PeerLost when a server cannot be restarted. After a block without an error the workers are stopped.
    """
    servers = Servers(config, Path(config.directory), 0, trains=False)
    try:
        client = BrokerClient(servers.address, servers.check)
        try:
            yield client, servers.check
            servers.expect_end()
            client.stop("everything is judged")
        finally:
            client.close()
    finally:
        servers.close()
