"""Evaluations in progress: the same workers, apart from the ledger, pinned to one version.

An evaluation group has a number of its own and can never enter a batch. Problems are cut into items of a fixed size in their
order, so that the text of an evaluation depends on nothing but the version. A rollout is not offered newer weights while an
evaluation still needs the version it has. Pure: no sockets, no clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prefixrl.common.messages import (
    UNPROVED,
    Evaluate,
    GroupPrefixes,
    GroupTask,
    Row,
    ScoredGroup,
)
from prefixrl.common.packing import pack_logprobs, token_ids
from prefixrl.common.seeds import derive
from prefixrl.learner.broker.groups import SampleItem, ScoreItem

ROWS_PER_ITEM = 64
STRANDED_S = 60.0
"""Where every rollout has passed the version of an evaluation for this long, none will come back to it."""


@dataclass
class EvaluationRun:
    """One evaluation: groups `first .. first + len(request.prompts)`."""

    request: Evaluate
    first: int
    to_sample: list[SampleItem] = field(default_factory=list)
    to_score: list[ScoreItem] = field(default_factory=list)
    unsampled: int = 0
    """Groups without prefixes, leased ones included."""
    stranded_s: float | None = None
    """Since when every rollout has passed its version."""
    results: dict[int, ScoredGroup] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Groups in all."""
        return len(self.request.prompts)

    @property
    def finished(self) -> bool:
        """Every group has a result or a cause."""
        return len(self.results) + len(self.failed) == self.total


class Evaluations:
    """Every evaluation the learner asked for since this broker started."""

    def __init__(self, run_seed: int, attempts: int) -> None:
        self._run_seed = run_seed
        self._attempts = attempts
        self._deaths: Counter[tuple[int, ...]] = Counter()
        self._runs: dict[str, EvaluationRun] = {}
        self._published: dict[int, str] = {}
        self._forgotten: Counter[str] = Counter()
        self._next = 0

    def add(self, request: Evaluate) -> None:
        """Start an evaluation; asking again for a known name changes nothing."""
        if request.name in self._runs:
            return
        run = EvaluationRun(request, self._next)
        self._next += len(request.prompts)
        self._runs[request.name] = run
        size = max(1, ROWS_PER_ITEM // request.samples)
        for start in range(0, run.total, size):
            seqs = tuple(range(run.first + start, run.first + min(start + size, run.total)))
            if request.version >= 0:
                run.to_sample.append(SampleItem(seqs, request.version))
                run.unsampled += len(seqs)
            else:
                groups = tuple(self._given_prefix(run, seq) for seq in seqs)
                run.to_score.append(ScoreItem(groups, -1, "", 0.0))

    def _given_prefix(self, run: EvaluationRun, seq: int) -> GroupPrefixes:
        tokens = run.request.prefix_tokens
        logprobs = pack_logprobs([0.0] * len(token_ids(tokens)))
        row = Row(tokens, logprobs, "length", (), run.request.prefix_text)
        task = self.group_task(seq)
        return GroupPrefixes(seq, task.prompt, task.seed, b"", (row,) * run.request.samples)

    def get(self, name: str) -> EvaluationRun | None:
        """The evaluation of that name."""
        return self._runs.get(name)

    def counts(self) -> dict[str, int]:
        """Groups asked for, judged and failed."""
        found = Counter(self._forgotten)
        for run in self._runs.values():
            found.update(_counts(run))
        return {name: found[name] for name in ("asked", "judged", "failed")}

    def forget(self, name: str) -> None:
        """Free a finished evaluation; raises ValueError while it is not, for its leases are still out."""
        run = self._runs.get(name)
        if run is not None and not run.finished:
            raise ValueError(f"evaluation {name} is not finished: it cannot be forgotten")
        if run is not None:
            self._forgotten.update(_counts(run))
            del self._runs[name]

    def run_of(self, seq: int) -> EvaluationRun:
        """The evaluation a group belongs to."""
        return next(run for run in self._runs.values() if run.first <= seq < run.first + run.total)

    def group_task(self, seq: int) -> GroupTask:
        """Prompt and seed of an evaluation group."""
        run = self.run_of(seq)
        index = seq - run.first
        return GroupTask(
            seq,
            run.request.prompts[index],
            derive(self._run_seed, "evaluation", run.request.name, index),
        )

    def published(self, version: int, digest: str) -> None:
        """Note what a version is in the present course of the run: a resumed one may come by a version a second time."""
        self._published[version] = digest

    def needs_version(self, version: int, digest: str) -> bool:
        """Whether some evaluation still has prefixes of these weights to sample (leased ones are not asked for here)."""
        return self._is_meant(version, digest) and any(
            item.version == version for run in self._runs.values() for item in run.to_sample
        )

    def _is_meant(self, version: int, digest: str) -> bool:
        """Before anything is published rollouts hold the initial adapter, which is version 0."""
        known = self._published.get(version)
        return known == digest if known is not None else version == 0

    def give_up_stranded(self, versions: Iterable[int], now_s: float) -> None:
        """Fail what no rollout will sample: all of them, whose `versions` these are, have been past it for a while."""
        oldest = min(versions, default=UNPROVED)
        for run in self._runs.values():
            version = run.request.version
            if not run.to_sample or oldest <= version:
                run.stranded_s = None
                continue
            run.stranded_s = now_s if run.stranded_s is None else run.stranded_s
            if now_s - run.stranded_s > STRANDED_S:
                for item in run.to_sample:
                    run.unsampled -= len(item.seqs)
                    reason = f"every rollout has passed version {version}"
                    run.failed.update(dict.fromkeys(item.seqs, reason))
                run.to_sample.clear()

    def unsampled_versions(self) -> set[int]:
        """Versions of which prefixes are still to come, leased ones included: rollouts that are older go there first."""
        return {run.request.version for run in self._runs.values() if run.unsampled}

    def rows_per_group(self, seqs: Sequence[int]) -> int:
        """Rows of each of these groups, which are of one evaluation."""
        return self.run_of(seqs[0]).request.samples

    def start_sampling(self, version: int, digest: str) -> SampleItem | None:
        """The next item for a rollout that has these weights."""
        if not self._is_meant(version, digest):
            return None
        for run in self._runs.values():
            if run.to_sample and run.to_sample[0].version == version:
                return run.to_sample.pop(0)
        return None

    def start_scoring(self) -> ScoreItem | None:
        """The next item for a scorer."""
        for run in self._runs.values():
            if run.to_score:
                return run.to_score.pop(0)
        return None

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        """A lease ended without a result; an item that ended too many workers is given up, named in `failed`."""
        run = self.run_of(item.seqs[0])
        self._deaths[item.seqs] += died
        if self._deaths[item.seqs] >= self._attempts:
            run.failed.update(
                dict.fromkeys(item.seqs, f"lost with its worker {self._attempts} times")
            )
            if isinstance(item, SampleItem):
                run.unsampled -= len(item.seqs)
            return
        if isinstance(item, SampleItem):
            run.to_sample.insert(0, item)
        else:
            run.to_score.insert(0, item)

    def take_prefixes(
        self,
        item: SampleItem,
        groups: Sequence[GroupPrefixes],
        weights_digest: str,
        sampled_s: float,
    ) -> None:
        """Accept the prefixes of a leased item."""
        run = self.run_of(item.seqs[0])
        run.unsampled -= len(groups)
        good = tuple(group for group in groups if not group.error)
        run.failed.update({group.seq: group.error for group in groups if group.error})
        if good:
            run.to_score.append(ScoreItem(good, item.version, weights_digest, sampled_s))

    def take_scores(self, groups: Sequence[ScoredGroup]) -> None:
        """Accept scored groups; a group judged twice keeps its first verdict."""
        for group in groups:
            self.run_of(group.prefixes.seq).results.setdefault(group.prefixes.seq, group)


def _counts(run: EvaluationRun) -> dict[str, int]:
    return {"asked": run.total, "judged": len(run.results), "failed": len(run.failed)}
