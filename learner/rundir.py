"""The run directory: one learner at a time, one config and one set of inputs for its whole life."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from prefixrl.common.config import RunConfig, from_json
from prefixrl.common.digests import file_digest, function_digest, model_digests
from prefixrl.common.errors import ConfigError
from prefixrl.common.hub import model_folder
from prefixrl.common.messages import ModelDigests
from prefixrl.common.process import own, write_atomically
from prefixrl.common.transport import check_endpoint
from prefixrl.learner.problems import input_files

REBIND_S = 10.0
"""How long the port of a run that goes on may stay taken: its last broker was killed, and its memory is being freed."""
FREE_SECTIONS = ("launch", "checkpoint", "evaluation", "broker")
Place = tuple[str, ...]
"""Of a key: the tables it lies in, and its name."""
FREE_KEYS: frozenset[Place] = frozenset(
    {
        ("rollout", "device"), ("rollout", "threads"), ("rollout", "vllm"),
        ("scorer", "device"), ("scorer", "threads"), ("scorer", "vllm"), ("scorer", "verifier_children"),
        ("scorer", "openai", "url"), ("scorer", "openai", "key_variable"), ("scorer", "openai", "requests"),
        ("scorer", "openai", "request_s"), ("scorer", "openai", "patience_s"),
        ("scorer", "openai", "prompt_price"), ("scorer", "openai", "completion_price"),
        ("learner", "device"), ("learner", "threads"), ("learner", "micro_batch_tokens"),
        ("learner", "batch_timeout_s"), ("learner", "collective_timeout_s"),
        ("filter", "limit_batches"), ("filter", "min_pass_rate"),
    }
)  # fmt: skip
"""What may differ when a run is resumed, sections and single keys: nothing that changes what is trained. A served target may
move to another address, but not be another."""


class RunDirectory:
    """Owns the directory of a run as long as the process lives."""

    def __init__(self, config: RunConfig, free_keys: frozenset[Place] = FREE_KEYS) -> None:
        """`free_keys`: what may differ from the config that stands there, besides `FREE_SECTIONS`."""
        self.path = Path(config.directory)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"directory = {config.directory!r} cannot be used: {error.strerror}"
            ) from None
        self._lock = own(self.path)
        try:
            self._adopt(config, free_keys)
        except ConfigError:
            self._lock.close()
            raise

    def _adopt(self, config: RunConfig, free_keys: frozenset[Place]) -> None:
        known = self.path / "config.json"
        if known.exists():
            before = from_json(known.read_text(encoding="utf-8"), str(known))
            _refuse_changes(before, config, self.path, free_keys)
        self._adopt_inputs(_inputs(config))
        write_atomically(known, config.model_dump_json(indent=2))

    def _adopt_inputs(self, given: "Inputs") -> None:
        known = inputs(self.path)
        changed = [
            name.replace("_", ".", 1)
            for name in Inputs.__struct_fields__
            if known is not None and getattr(known, name) != getattr(given, name)
        ]
        if changed:
            raise ConfigError(
                f"{self.path} holds a run whose input files were others: {', '.join(changed)} changed since it began; "
                "give them back, choose another directory (--set directory=...), or start anew (--fresh)"
            )
        write_atomically(
            self.path / "inputs.json", msgspec.json.format(msgspec.json.encode(given)).decode()
        )


class Inputs(msgspec.Struct, frozen=True):
    """Digests of the files that decide what is trained; a run resumes with the same ones, whatever their names.

    The journal names problems by their place, holds rewards as they were judged, and a checkpoint may hold no more of a model
    than what was added to it.
    """

    data_train: tuple[str, ...]
    """One per file, those named by `without` included."""
    reward_function: str
    algorithm_advantage_function: str
    adapter_model: ModelDigests
    target_model: ModelDigests | None
    """None in direct mode; of a hub name, which need not be on this host, the digest of the name."""


def inputs(directory: Path) -> Inputs | None:
    """What a run began with; None where it has not begun."""
    noted = directory / "inputs.json"
    return msgspec.json.decode(noted.read_bytes(), type=Inputs) if noted.exists() else None


def _inputs(config: RunConfig) -> Inputs:
    return Inputs(
        data_train=tuple(file_digest(path) for path in input_files(config.data.train)),
        reward_function=function_digest(config.reward.function),
        algorithm_advantage_function=function_digest(config.algorithm.advantage_function),
        adapter_model=model_digests(model_folder(config.adapter.model)),
        target_model=model_digests(config.target.model) if config.target else None,
    )


def _refuse_changes(
    known: RunConfig, given: RunConfig, path: Path, free_keys: frozenset[Place]
) -> None:
    free = free_keys | {(section,) for section in FREE_SECTIONS}
    changed = list(_changes(known.model_dump(), given.model_dump(), (), free))
    if changed:
        raise ConfigError(
            f"{path} holds a run with other settings; give them back, choose another directory (--set directory=...), or start "
            "anew (--fresh)\n" + "\n".join(changed)
        )


def _changes(was: object, now: object, place: Place, free: frozenset[Place]) -> Iterator[str]:
    """A line per key that differs and is not free."""
    if was == now or place in free:
        return
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        for key in now:
            yield from _changes(was[key], now[key], (*place, key), free)
    else:
        yield f"  {'.'.join(place)}: {was!r} -> {now!r}"


def check_port_is_free(endpoint: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError when the endpoint is none, or its fixed TCP port stays taken; the broker would find out later."""
    if not check_endpoint(endpoint).startswith("tcp://") or endpoint.endswith(":0"):
        return
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    deadline_s = time.monotonic() + patience_s
    while problem := _binding_problem(host, int(port)):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"broker.listen = {endpoint!r} cannot be bound: {problem}; choose another port, or 0 for a free one"
            )
        time.sleep(0.1)


def _binding_problem(host: str, port: int) -> str:
    """Why a TCP port cannot be bound now, "" where it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return os.strerror(error.errno or 0)
    return ""
