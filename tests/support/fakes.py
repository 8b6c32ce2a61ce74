"""Fakes for tests of the links: peers, brokers, tasks and results.

A small run on disk, peers with real sockets, and answers a rollout or scorer could give.
"""

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.process import write_atomically
from prefixrl.common.host.serving import command
from prefixrl.common.run.digests import model_digests, scorer_digests
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.run.status import AdmissionStatus, StatusDocument, WorkerStatus
from prefixrl.common.weights.delta import write_delta
from prefixrl.common.weights.snapshot import describe, write_snapshot
from prefixrl.common.wire.address import Address
from prefixrl.common.wire.keys import KeyRole
from prefixrl.common.wire.messages import learner as rank_messages
from prefixrl.common.wire.messages import worker as worker_messages
from prefixrl.common.wire.messages.fields import Role
from prefixrl.common.wire.messages.groups import GroupPrefixes, ScoredGroup, VersionSpan
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import EngineChecksum, WeightsNote
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.wire.transport import Client, Server
from prefixrl.learner.broker.__main__ import build
from prefixrl.learner.broker.server import Broker
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.weights.server import WeightServerStart
from support.keys import address, folder, give_keys, key, keys
from support.messages import empty, group, row, scored_group, verdict
from support.rows import jsonl

Wanted = TypeVar("Wanted")

ROWS = 2
NOTE = WeightsNote(0, "d0", pack_tokens([1, 2, 3]), pack_logprobs([-1.0, -2.0]))
INSTALLED = EngineChecksum("c", "snapshot")
"""Checksum of an engine that holds what it installed."""


def run_on_disk(
    folder: Path, *, problems: int = 40, mode: str = "prefix", **sections: dict[str, Any]
) -> RunConfig:
    """Models of a few bytes, problems, and a config of 4 groups of 2 per iteration.

    `config.json` as the learner leaves it.

    `sections`: keys that differ, section by section.
    """
    for name in ("adapter", "target"):
        model = folder / name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}")
        (model / "tokenizer.json").write_text(name)
        (model / "chat_template.jinja").write_text(name)
        (model / "model.safetensors").write_bytes(name.encode() * 8)
    rows = [{"id": f"p{i}", "question": f"{i} + 1 =", "answer": i + 1} for i in range(problems)]
    jsonl(folder, rows, "train.jsonl")
    algorithm = {
        "groups_per_iteration": 4,
        "samples_per_prompt": ROWS,
        "iterations": 5,
        "minibatches": 1,
        "admission": "as_early_as_allowed",  # tests count on as many tasks as the window allows
    }
    usual: dict[str, dict[str, Any]] = {
        "adapter": {"model": str(folder / "adapter")},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"groups_per_task": 2},
        "algorithm": algorithm,
        "broker": {"heartbeat_s": 1.0, "silence_s": 30.0},
    }
    if mode == "prefix":
        usual["target"] = {"model": str(folder / "target")}
    changed = {name: usual.get(name, {}) | keys for name, keys in sections.items()}
    config = RunConfig.model_validate(
        {"directory": str(folder / "run"), "mode": mode} | usual | changed
    )
    directory = Path(config.directory)
    directory.mkdir(exist_ok=True)
    write_format(directory)
    give_keys(directory)
    (directory / "config.json").write_text(config.model_dump_json())
    return config


class Peer:
    """A connection to a broker that sends exactly what the test chooses."""

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._endpoint, self._identity = endpoint, identity
        self._role: KeyRole = "worker"
        self._has_joined = False
        self.client = self._connected()
        self.passed_over: list[rank_messages.FromBroker] = []

    def _connected(self) -> Client[rank_messages.FromBroker, rank_messages.ToBroker]:
        return Client(self._endpoint, rank_messages.FromBroker, self._identity, key(self._role))

    def say(self, message: rank_messages.ToBroker) -> None:
        self.client.send(message)

    def hear(self, kind: type[Wanted], timeout_s: float = 20.0) -> Wanted:
        """The next message of a type; those before it are kept in `passed_over`."""
        return self.hear_with_payload(kind, timeout_s)[0]

    def hear_with_payload(
        self, kind: type[Wanted], timeout_s: float = 20.0
    ) -> tuple[Wanted, list[bytes]]:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            received = self.client.receive(0.2)
            if received is None:
                continue
            if isinstance(received[0], kind):
                return received[0], received[1]
            self.passed_over.append(received[0])
        raise AssertionError(f"no {kind} within {timeout_s:g} s, only {self.passed_over}")

    def hears_nothing_of(self, unwanted: type[Any], for_s: float = 0.3) -> bool:
        received = self.client.receive(for_s)
        while received is not None and not isinstance(received[0], unwanted):
            self.passed_over.append(received[0])
            received = self.client.receive(for_s)
        return received is None

    def join(self, role: Role, protocol: int = PROTOCOL) -> worker_messages.Welcome:
        """Connect with the key of the role, and say Hello."""
        needed: KeyRole = role if role == "rank" or role == "operator" else "worker"
        if needed != self._role:
            self.client.close()
            if self._has_joined:  # another process, with another key
                self._identity += needed.encode()
            self._role = needed
            self.client = self._connected()
        self._has_joined = True
        self.say(
            worker_messages.Hello(
                protocol=protocol, role=role, incarnation="incarnation", host="host", pid=4711
            )
        )
        return self.hear(worker_messages.Welcome)

    def ready(self, config: RunConfig, role: Role, slots: int = 1, version: int = 0) -> None:
        """Join and be ready as a rollout or scorer that loaded what the run means."""
        self.join(role)
        self.say(ready(config, role, slots, version))

    def close(self) -> None:
        self.client.close(linger_s=1.0)


@contextmanager
def peers(endpoint: str, *names: str) -> Iterator[list[Peer]]:
    """Connections with the names as identities."""
    opened = [Peer(endpoint, name.encode()) for name in names]
    try:
        yield opened
    finally:
        for peer in opened:
            peer.close()


def ready(
    config: RunConfig,
    role: Role,
    slots: int = 1,
    version: int = 0,
    digests: worker_messages.ModelDigests | None = None,
) -> worker_messages.Ready:
    """Ready of a worker that loaded what the run means, or what has other digests."""
    if role == "rollout":
        digests = digests or model_digests(config.model_of(role))
        return offer(slots, digests, "fake", version, f"d{version}")
    return offer(slots, digests or scorer_digests(config, config.model_of("scorer")), "fake")


def offer(
    slots: int,
    digests: worker_messages.ModelDigests,
    engine: str,
    version: int = -1,
    weights_digest: str = "",
    takes_runs: bool = True,
) -> worker_messages.Ready:
    """Ready of a worker that takes so many tasks at once; of one that needs no runs of groups, so many rows."""
    return worker_messages.Ready(
        seats=slots if not takes_runs else 1,
        room=slots,
        takes_runs=takes_runs,
        digests=digests,
        version=version,
        weights_digest=weights_digest,
        engine=engine,
    )


def sampled(
    task: worker_messages.PrefixTask, digest: str | None = None
) -> worker_messages.Prefixes:
    """Return a rollout's result of a task."""
    digest = f"d{task.version}" if digest is None else digest
    written = row([task.version, 7], spans=(VersionSpan(task.version, digest, 2),))
    groups = tuple(
        group(
            prompt_of_task.seq,
            *(written,) * task.rows_per_group,
            prompt=prompt_of_task.prompt,
            seed=prompt_of_task.seed,
        )
        for prompt_of_task in task.groups
    )
    return worker_messages.Prefixes(
        task=task.task,
        kind=task.kind,
        version=task.version,
        weights_digest=digest,
        groups=groups,
        elapsed_s=0.5,
    )


def scored(task: worker_messages.ScoreTask, reward: float = 1.0) -> worker_messages.Scores:
    """Return a scorer's result of a task."""
    groups = tuple(judged(prefixes, task, reward) for prefixes in task.groups)
    return worker_messages.Scores(task.task, task.kind, groups)


def judged(
    prefixes: GroupPrefixes, task: worker_messages.ScoreTask, reward: float = 1.0
) -> ScoredGroup:
    """A group with one verdict per row."""
    right = verdict(reward, extracted="1", completion_tokens=3, elapsed_ms=5)
    return scored_group(
        prefixes,
        *(right,) * len(prefixes.rows),
        version=task.version,
        weights_digest=task.weights_digest,
    )


@contextmanager
def serving(
    config: RunConfig, prepare: Callable[[Broker], None] = lambda broker: None, ranks: int = 1
) -> Iterator[Broker]:
    """A broker of this config served by a thread; `endpoint` is in the run directory."""
    directory, stop = Path(config.directory), threading.Event()
    server: Server[rank_messages.ToBroker, rank_messages.FromBroker] = Server(
        "tcp://127.0.0.1:0", rank_messages.ToBroker, keys()
    )
    start = Start(0, "tcp://127.0.0.1:9", ranks=ranks)
    broker = build(config, directory, start, lambda: server)
    prepare(broker)
    write_atomically(directory / "endpoint", server.endpoint)

    failures: list[BaseException] = []

    def serve() -> None:
        try:
            broker.serve(stop.is_set)
            broker.close_journals()
            server.close(linger_s=0.5)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=serve, name="broker")
    thread.start()
    try:
        yield broker
    finally:
        stop.set()
        thread.join(30.0)
        assert not thread.is_alive(), "the broker does not end"
    assert not failures, failures


def address_of(config: RunConfig, role: KeyRole = "worker") -> Address:
    """Return the address of a run's broker."""
    return address(endpoint_of(config), role)


def endpoint_of(config: RunConfig) -> str:
    """Return the endpoint of a run's broker."""
    return (Path(config.directory) / "endpoint").read_text().strip()


def process(
    module: str, directory: Path | str, options: msgspec.Struct
) -> "subprocess.Popen[bytes]":
    """A server of the learner, started as the learner would."""
    return subprocess.Popen(command(module, Path(directory), options), stderr=subprocess.DEVNULL)


def broker_process(config: RunConfig, iteration: int = 0, **more: Any) -> "subprocess.Popen[bytes]":
    """The broker of a run, of which nobody fetches weights."""
    start = Start(iteration, "tcp://127.0.0.1:9", **more)
    return process("prefixrl.learner.broker", config.directory, start)


def free_pair() -> int:
    """A port that is free, and the next one too; below those that the kernel gives to other tests meanwhile."""
    while True:
        port = random.SystemRandom().randrange(12000, 32000, 2)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def end(child: "subprocess.Popen[bytes]") -> None:
    """SIGKILL and wait."""
    child.kill()
    child.wait()


def document(*workers: WorkerStatus, **fields: Any) -> StatusDocument:
    """Return a broker's status; fields that are not given are empty."""
    usual = {"run_id": "r", "window": 2, "admission": empty(AdmissionStatus, rule="just_in_time")}
    return empty(StatusDocument, workers=list(workers), **usual | fields)


def worker_status(role: str, engine: str, state: str = "idle", **fields: Any) -> WorkerStatus:
    """One worker in a broker's status."""
    usual = {"name": f"{role}-0", "host": "host", "pid": 1, "phase": "ready", "seats": 1}
    usual |= {"busy_fraction": 0.5, "tasks_done": 1, "proof": "digest", "activity": "working"}
    return empty(WorkerStatus, role=role, engine=engine, state=state, **usual | fields)


class SteppedClock:
    """A replacement of a module's `time`: it passes only during sleeps, and at once."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = 30.0, poll_s: float = 0.01
) -> Any:
    """Poll until the condition is true; its value."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(poll_s)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


@contextmanager
def weight_server(
    directory: Path, listen: str = "tcp://127.0.0.1:0"
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A weight server process over a folder of snapshots; yields its endpoint and itself."""
    directory.mkdir(parents=True, exist_ok=True)
    endpoint_file = directory / "endpoint"
    endpoint_file.unlink(missing_ok=True)
    start = WeightServerStart(str(folder()), listen, str(endpoint_file), f"ipc://{directory}/door")
    child = process("prefixrl.learner.weights.server", directory, start)
    try:
        wait_until(endpoint_file.exists, "the weight server's socket")
        yield endpoint_file.read_text().strip(), child
    finally:
        end(child)


def publish(directory: Path, version: int, chunk_bytes: int = 256) -> dict[str, torch.Tensor]:
    """Write a snapshot of about 80 chunks; its tensors."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        "layer.weight": torch.randn(64, 64, generator=generator),
        "layer.bias": torch.randn(2000, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(version)),
    }
    manifest = msgspec.structs.replace(describe(version, tensors), chunk_bytes=chunk_bytes)
    write_snapshot(directory, manifest, tensors)
    return tensors


def publish_next(
    directory: Path, version: int, before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write a snapshot in which a few values differ from `before`, version - 1, and the delta; its tensors."""
    tensors = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in tensors.values():
        tensor.reshape(-1)[version % tensor.numel()] += 1.0
    manifest = msgspec.structs.replace(describe(version, tensors), chunk_bytes=256)
    write_snapshot(directory, manifest, tensors)
    assert write_delta(directory, version - 1, version)
    return tensors


def trained_further(tensors: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Every tenth value moved, as a training step would: by steps in proportion to the value's own size."""
    random = torch.Generator().manual_seed(version)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=random) < 0.1,
            tensor * (1 + 0.01 * torch.randn(tensor.shape, generator=random)),
            tensor,
        ).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def status(peer: Peer) -> dict[str, Any]:
    """The status document, as an operator gets it."""
    peer.say(rank_messages.GetStatus())
    document: dict[str, Any] = msgspec.json.decode(peer.hear(rank_messages.Status).document)
    return document


def learner(peer: Peer) -> Peer:
    """Join as rank 0 and publish version 0."""
    peer.join("rank")
    peer.say(rank_messages.Published(NOTE))
    peer.hear(rank_messages.Accepted)
    return peer


def score_one_item(rollout: Peer, scorer: Peer) -> list[int]:
    """One task through a ready rollout and a ready scorer."""
    task = rollout.hear(worker_messages.PrefixTask)
    rollout.say(sampled(task))
    rollout.hear(worker_messages.Ack)
    score = scorer.hear(worker_messages.ScoreTask)
    scorer.say(scored(score))
    scorer.hear(worker_messages.Ack)
    return [group.seq for group in task.groups]


def groups_of(
    rank: Peer, batch: rank_messages.Batch, indices: Sequence[int] | None = None
) -> list[ScoredGroup]:
    """Groups of a batch as the broker hands them out, all without `indices`."""
    rank.say(
        rank_messages.GetGroups(
            batch.iteration, tuple(range(len(batch.groups)) if indices is None else indices)
        )
    )
    _, carried = rank.hear_with_payload(rank_messages.Groups)
    return [msgspec.msgpack.decode(frame, type=ScoredGroup) for frame in carried]


def train(rank: Peer, iteration: int) -> rank_messages.Batch:
    rank.say(rank_messages.GetBatch(iteration, 0, 1))
    return rank.hear(rank_messages.Batch)
