"""A run of the real broker and real daemons whose engines only take the declared times: no model is loaded."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.learner import Batch, GetBatch
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.weights.publish import Publisher

GROUPS = 16
"""Per iteration: two for each slot of two scorers."""
SLOTS = 4
"""Seats of every worker."""
PROBE = [(np.zeros(1, np.int32), np.arange(1, 64, dtype=np.int32))]
PROBE_LOGPROBS = np.zeros(63, np.float32)
"""Logprobs of the simulated engine for the probe."""
PATIENCE_S = 300.0


def simulated_run(
    directory: Path, iterations: int, prefix_s: float, scoring_s: float, **sections: object
) -> RunConfig:
    """A run on disk; its models are a few bytes, which nobody reads."""
    for name in ("adapter", "target"):
        model = directory / name
        model.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (model / file).write_text("{}", encoding="utf-8")
        (model / "chat_template.jinja").write_text(name, encoding="utf-8")
        (model / "model.safetensors").write_bytes(name.encode() * 8)
    rows = [
        {"id": f"p{each}", "question": f"{each} + 1 =", "answer": each + 1} for each in range(64)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text(lines, encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "directory": str(directory / "run"),
            "adapter": {"model": str(directory / "adapter")},
            "target": {"model": str(directory / "target")},
            "data": {"train": str(directory / "train.jsonl")},
            "rollout": {"engine": "simulated", "groups_per_task": 1, "prefix_tokens": 4},
            "scorer": {"engine": "simulated", "max_new_tokens": 8},
            # Right answers need no sympy: what is measured is not how fast answers are judged.
            "simulated": {"prefix_s": prefix_s, "completion_s": scoring_s, "accuracy": 1.0},
            "algorithm": {
                "groups_per_iteration": GROUPS,
                "samples_per_prompt": 2,
                "minibatches": 1,
                "iterations": iterations,
                "max_staleness": 2,
            },
            "broker": {"silence_s": 60.0},
            **sections,
        }
    )
    (directory / "run").mkdir()
    write_format(directory / "run")
    (directory / "run" / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    return config


@contextmanager
def learner(servers: Servers, config: RunConfig) -> Iterator[tuple[BrokerClient, Publisher]]:
    """A learner that trains nothing and has published version 0; it ends the run."""
    stop = StopSignal(servers=servers)
    client = BrokerClient(servers.address, stop)
    weights = Path(config.directory) / "weights"
    publisher = Publisher(servers.address, weights, PROBE, False, stop)
    publisher.publish(0, {"weight": torch.zeros(4)}.items(), PROBE_LOGPROBS)
    yield client, publisher
    servers.expect_end()
    client.stop("done")
    client.close()
    publisher.close()


def take_batch(client: BrokerClient, iteration: int) -> tuple[Batch, list[ScoredGroup]]:
    """Return the whole batch of an iteration, once there is one, and its groups."""
    answer = client.next_batch(GetBatch(iteration, 0, 1), PATIENCE_S)
    assert isinstance(answer, Batch), answer
    return answer, list(client.groups(iteration, range(len(answer.groups))).values())


@contextmanager
def daemons(role: str, count: int, directory: Path) -> Iterator[None]:
    """So many rollouts or scorers; they are killed at the end."""
    command = [sys.executable, "-m", f"prefixrl.{role}", "--run", str(directory)]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()
