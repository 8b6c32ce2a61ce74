"""Refuses a worker that loaded something else than the run means: another model, tokenizer, chat template or version."""

from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.digests import model_digests
from prefixrl.common.messages import ModelDigests


class IdentityCheck:
    """Digests per role and per version. Where the model is not on this host, the first worker of a role sets them."""

    def __init__(self, config: RunConfig) -> None:
        self._expected: dict[str, ModelDigests] = {}
        for role, model in (("rollout", config.adapter.model), ("scorer", config.target.model)):
            if Path(model).is_dir():
                self._expected[role] = model_digests(model)
        self._versions: dict[int, set[str]] = {}
        self._initial: str | None = None

    def check(self, role: str, digests: ModelDigests) -> None:
        """Raise ValueError naming what differs."""
        expected = self._expected.setdefault(role, digests)
        for part in ("model", "tokenizer", "chat_template"):
            got, wanted = getattr(digests, part), getattr(expected, part)
            if got != wanted:
                what = {"rollout": "adapter", "scorer": "target"}[role]
                raise ValueError(
                    f"this {role} loaded another {what}: digest of its {part.replace('_', ' ')} is {got}, "
                    f"the run's is {wanted}; give it the same files (--model)"
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
