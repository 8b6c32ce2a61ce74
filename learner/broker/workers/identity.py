"""The check that a worker loaded the run's model, tokenizer, template and published weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.process import write_atomically
from prefixrl.common.journal.records import RunHeader
from prefixrl.common.run.changes import FREE_KEYS, settings_besides
from prefixrl.common.run.digests import (
    function_digest,
    model_digests,
    name_digest,
    process_digest,
    scorer_digests,
)
from prefixrl.common.wire.messages.fields import VERSIONS_KEPT
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import ModelDigests, Welcome
from prefixrl.learner.run.directory import Inputs

_LOADED = ("model", "tokenizer", "chat_template")
SERVED_FILE = "served_model.txt"


class IdentityCheck:
    """Expected digests by role and version; the first scorer sets the digests of a remote target."""

    def __init__(self, config: RunConfig, directory: Path, inputs: Inputs | None) -> None:
        """Take `inputs`, the digests of what the learner loaded; None without a learner."""
        self._expected: dict[str, ModelDigests] = {}
        adapter, target = config.model_of("rollout"), config.model_of("scorer")
        if inputs is not None or Path(adapter).is_dir():
            self._expected["rollout"] = inputs.adapter_model if inputs else model_digests(adapter)
        if Path(target).is_dir():
            self._expected["scorer"] = scorer_digests(config, target)
        self._served = directory / SERVED_FILE if config.scorer.is_served else None
        self._served_name = config.scorer.openai.model
        self._function = config.reward.function
        # The file is on this host even where the models are not.
        self._function_digest = function_digest(self._function)
        prm = config.scorer.prm
        self._process_model = prm.model if prm else None
        # A hub name is known by the first scorer's, where this host has no such folder.
        self._process_digest = (
            process_digest(prm.model) if prm and Path(prm.model).is_dir() else None
        )
        self._loaded = {
            "rollout": "adapter",
            "scorer": "target" if config.mode == "prefix" else "adapter's tokenizer",
        }
        self._versions: dict[int, set[str]] = {}
        self._newest = 0
        self._initial: str | None = None

    def check(self, role: str, digests: ModelDigests) -> None:
        """Raise ValueError with the part and both digests where a worker loaded something else."""
        if role == "scorer" and digests.reward_function != self._function_digest:
            raise ValueError(
                f"this scorer has another reward.function: digest of its file is "
                f"{digests.reward_function or 'missing'}, the run's is {self._function_digest or 'missing'}; copy the "
                f"learner's {self._function} to its host, or install the same version of its package there"
            )
        if role == "scorer" and self._process_model is not None:
            # Where this host has no such folder, the first scorer's files become those of the run.
            self._process_digest = self._process_digest or digests.process_model
            if digests.process_model != self._process_digest:
                raise ValueError(
                    f"this scorer loaded another scorer.prm.model: digest of its files is "
                    f"{digests.process_model or 'missing'}, the run's is {self._process_digest}; copy the learner's "
                    f"{self._process_model} to its host"
                )
        served = self._served if role == "scorer" else None
        # In the same way the first worker decides where this host has no copy of the model.
        expected = self._expected.setdefault(role, digests)
        # A scorer of a served target loads a tokenizer alone; the model's name is compared below.
        for part in ("tokenizer", "chat_template") if served else _LOADED:
            got, digest = getattr(digests, part), getattr(expected, part)
            if got != digest:
                raise ValueError(
                    f"this {role} loaded another {self._loaded[role]}: digest of its {part.replace('_', ' ')} is "
                    f"{got}, the run's is {digest}; give it the same files (--model)"
                )
        if served:
            self._check_served(digests.model, served)

    def _check_served(self, got: str, noted: Path) -> None:
        if self._served_name is not None:
            digest = name_digest(self._served_name)
        elif noted.exists():
            digest = noted.read_text(encoding="utf-8")
        else:
            digest = got
            write_atomically(noted, got)
        if got != digest:
            raise ValueError(
                f"this scorer's endpoint serves another target than the run began with: the digest of its name is "
                f"{got}, the run's is {digest}; serve the model under the name it had"
            )

    def publish(self, version: int, digest: str) -> None:
        """Note a digest of a version; after a resume from a checkpoint a version may have several."""
        self._versions.setdefault(version, set()).add(digest)
        self._newest = max(self._newest, version)
        for old in [each for each in self._versions if each <= version - VERSIONS_KEPT]:
            del self._versions[old]

    @property
    def digests(self) -> dict[int, tuple[str, ...]]:
        """Digests of the newest versions."""
        return {version: tuple(sorted(known)) for version, known in self._versions.items()}

    def restore(self, digests: Mapping[int, Sequence[str]]) -> None:
        """Take over the digests that another broker of the run knew."""
        self._versions = {version: set(known) for version, known in digests.items()}
        self._newest = max(self._versions, default=0)

    def check_version(self, version: int, digest: str) -> None:
        """Raise ValueError unless these weights were published, or are the initial adapter's, or are forgotten."""
        if version <= self._newest - VERSIONS_KEPT:
            return
        if version == 0 and 0 not in self._versions:
            self._initial = self._initial or digest
            if digest == self._initial:
                return
        if digest not in self._versions.get(version, set()):
            raise ValueError(f"weights {digest} were never published as version {version}")


def target_digest(config: RunConfig) -> str:
    """Return a digest of the target and of all settings by which a run asks it; "" without a target.

    The keys that a resumed run may change are no part of it: a served target that moved is the same model.
    """
    if config.target is None:
        return ""
    document = config.model_dump(mode="json", include={"target", "scorer"})
    settings = list(settings_besides(document, FREE_KEYS))
    digests = model_digests(config.target.model)
    return name_digest(repr((digests, settings)))


class Start(msgspec.Struct, frozen=True):
    """Options of a broker's start; its directory is the run directory."""

    iteration: int
    """Number of iterations the learner has completed."""
    weights_endpoint: str
    local_weights_endpoint: str = ""
    """Endpoint of the same server for workers on this host."""
    ranks: int = 1
    """Number of learner ranks."""
    is_restart: bool = False
    """True where an earlier broker of the present ranks died."""
    trains: bool = True
    """False: issue no groups, serve evaluations alone."""


@dataclass(frozen=True)
class RunState:
    """Facts about the run besides the ledger."""

    header: RunHeader
    start: Start
    problems: int
    identity: IdentityCheck

    def welcome(self, worker: str, config: RunConfig, beat_s: float | None = None) -> Welcome:
        """Return the answer to a Hello; `beat_s`: time between heartbeats, None for the config's."""
        if beat_s is not None:
            config = config.model_copy(
                update={"broker": config.broker.model_copy(update={"heartbeat_s": beat_s})}
            )
        return Welcome(
            protocol=PROTOCOL,
            run_id=self.header.run_id,
            worker=worker,
            config_json=config.model_dump_json(),
            weights_endpoint=self.start.weights_endpoint,
            local_weights_endpoint=self.start.local_weights_endpoint,
        )
