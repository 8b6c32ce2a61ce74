"""Refuses a worker that loaded something else than the run means: another model, tokenizer, chat template or version.

Of a target that is served elsewhere it is the name under which the endpoint knows it: the run file's, else the first scorer's,
which is kept for a resumed run.
"""

from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.digests import function_digest, model_digests, name_digest, scorer_digests
from prefixrl.common.messages import ModelDigests
from prefixrl.common.process import write_atomically
from prefixrl.learner.rundir import Inputs

_LOADED = ("model", "tokenizer", "chat_template")
SERVED_FILE = "served_model.txt"
"""In the run directory: the digest of the name of the model that the endpoint serves."""


class IdentityCheck:
    """Digests per role and per version. Where the target is not on this host, the first scorer sets them."""

    def __init__(self, config: RunConfig, directory: Path, inputs: Inputs | None) -> None:
        """`inputs`: what the learner loaded; None where no learner began the run, for a broker on its own."""
        self._expected: dict[str, ModelDigests] = {}
        if inputs is not None:
            self._expected["rollout"] = inputs.adapter_model
        elif Path(config.model_of("rollout")).is_dir():
            self._expected["rollout"] = model_digests(config.model_of("rollout"))
        if Path(config.model_of("scorer")).is_dir():
            self._expected["scorer"] = scorer_digests(config, config.model_of("scorer"))
        self._served = directory / SERVED_FILE if config.scorer.engine == "openai" else None
        self._served_name = config.scorer.openai.model
        self._function = config.reward.function
        # The file is on this host even where the models are not.
        self._function_digest = function_digest(self._function)
        self._loaded = {
            "rollout": "adapter",
            "scorer": "target" if config.mode == "prefix" else "adapter's tokenizer",
        }
        self._versions: dict[int, set[str]] = {}
        self._initial: str | None = None

    def check(self, role: str, digests: ModelDigests) -> None:
        """Raise ValueError naming what differs."""
        if role == "scorer" and digests.reward_function != self._function_digest:
            raise ValueError(
                f"this scorer has another reward.function: digest of its file is {digests.reward_function or 'missing'}, the "
                f"run's is {self._function_digest or 'missing'}; copy the learner's {self._function} to its host"
            )
        served = self._served if role == "scorer" else None
        expected = self._expected.setdefault(role, digests)
        for part in ("tokenizer", "chat_template") if served else _LOADED:
            got, wanted = getattr(digests, part), getattr(expected, part)
            if got != wanted:
                raise ValueError(
                    f"this {role} loaded another {self._loaded[role]}: digest of its {part.replace('_', ' ')} is {got}, "
                    f"the run's is {wanted}; give it the same files (--model)"
                )
        if served:
            self._check_served(digests.model, served)

    def _check_served(self, got: str, noted: Path) -> None:
        if self._served_name is not None:
            wanted = name_digest(self._served_name)
        elif noted.exists():
            wanted = noted.read_text(encoding="utf-8")
        else:
            wanted = got
            write_atomically(noted, got)
        if got != wanted:
            raise ValueError(
                f"this scorer's endpoint serves another target than the run began with: the digest of its name is {got}, "
                f"the run's is {wanted}; serve the model under the name it had"
            )

    def publish(self, version: int, digest: str) -> None:
        """Note a digest of a version; after a restart from a checkpoint a version may have several."""
        self._versions.setdefault(version, set()).add(digest)

    def check_version(self, version: int, digest: str) -> None:
        """Raise ValueError unless these weights were published as this version (or are the initial adapter's)."""
        if version == 0 and 0 not in self._versions:
            self._initial = self._initial or digest
            if digest == self._initial:
                return
        if digest not in self._versions.get(version, set()):
            raise ValueError(f"weights {digest} were never published as version {version}")
