"""Evaluations in progress: work pinned to one version, apart from the ledger.

An evaluation group has a number of its own and can never enter a batch. Problems are cut into items of a fixed size in
their order, so that the text of an evaluation depends on nothing but the version. A rollout is not offered newer
weights while an evaluation still needs the version it has. Pure: no sockets, no clock.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from prefixrl.common.config.run import MOST_TASK_BYTES, SAMPLED_TOKEN_BYTES
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.fields import UNPROVED, VERSIONS_KEPT
from prefixrl.common.wire.messages.groups import GroupPrefixes, GroupTask, Prompt, Row, ScoredGroup
from prefixrl.common.wire.messages.learner import Evaluate, EvaluationProgress
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.broker.groups.drafts import Drafts
from prefixrl.learner.broker.groups.states import SampleItem, ScoreItem

ROWS_PER_ITEM = 64
STRANDED_S = 60.0
"""Time after which an evaluation is given up once every rollout is past its version."""


@dataclass
class EvaluationRun:
    """One evaluation: groups `first .. first + len(request.prompts)`."""

    request: Evaluate
    first: int
    to_sample: list[SampleItem] = field(default_factory=list)
    to_score: list[ScoreItem] = field(default_factory=list)
    unsampled: int = 0
    """Number of groups without prefixes, leased ones included."""
    stranded_s: float | None = None
    """Time since which every rollout is past its version."""
    results: dict[int, ScoredGroup] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    deaths: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Workers lost, by the groups of the item that they held."""

    @property
    def total(self) -> int:
        """Number of groups."""
        return len(self.request.prompts)

    @property
    def finished(self) -> bool:
        """True if every group has a result or a cause."""
        return len(self.results) + len(self.failed) == self.total

    def fail(self, item: SampleItem | ScoreItem, cause: str) -> None:
        """End the groups of an item without a result."""
        self.failed.update(dict.fromkeys(item.seqs, cause))
        if isinstance(item, SampleItem):
            self.unsampled -= len(item.seqs)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of groups requested, judged and failed."""
        return {"asked": self.total, "judged": len(self.results), "failed": len(self.failed)}


class EvaluationQueue:
    """Evaluations requested since this broker started."""

    def __init__(self, run_seed: int, attempts: int, drafts: Drafts | None = None) -> None:
        """`drafts`: those that the adapter reads, if it does."""
        self._run_seed, self._attempts = run_seed, attempts
        self._drafts = drafts
        self.runs: dict[str, EvaluationRun] = {}
        self._published: dict[int, str] = {}
        self._forgotten = Counter[str](asked=0, judged=0, failed=0)
        self._next = 0

    def add(self, request: Evaluate) -> None:
        """Start an evaluation unless its name is known; ValueError where it is too large."""
        if request.name in self.runs:
            return
        _check_size(request)
        run = EvaluationRun(request, self._next)
        self._next += len(request.prompts)
        self.runs[request.name] = run
        if self._drafts and self._awaits_drafts(request):
            self._drafts.request_drafts(request.prompts, for_training=False)
        size = max(1, ROWS_PER_ITEM // request.samples)
        for start in range(0, run.total, size):
            seqs = tuple(range(run.first + start, run.first + min(start + size, run.total)))
            if request.version >= 0:
                run.to_sample.append(SampleItem(seqs, request.version))
                run.unsampled += len(seqs)
            else:
                groups = tuple(self._given_prefix(run, seq) for seq in seqs)
                run.to_score.append(ScoreItem(groups, -1, "", 0.0))

    def refuse_newest(self, cause: str) -> str:
        """Fail the groups of the newest evaluation that no worker holds; return its name, "" if there is none."""
        for name, run in reversed(self.runs.items()):
            if run.to_sample or run.to_score:
                self.refuse_evaluation(name, cause)
                return name
        return ""

    def refuse_evaluation(self, name: str, cause: str) -> None:
        """Fail the groups of an evaluation that no worker holds."""
        run = self.runs[name]
        for sampling in run.to_sample:
            run.fail(sampling, cause)
        for scoring in run.to_score:
            run.fail(scoring, cause)
        run.to_sample.clear()
        run.to_score.clear()
        if self._drafts:
            self._drafts.withdraw_drafts(self.drafted_prompts(), also_training=False)

    def drafted_prompts(self) -> Iterator[Prompt]:
        """Yield the problems whose drafts unfinished evaluations need."""
        for run in self.runs.values():
            if not run.finished and self._awaits_drafts(run.request):
                yield from run.request.prompts

    def texts_of(self, request: Evaluate) -> int:
        """Return the completions that an evaluation takes, drafts that are missing included."""
        drafts = 0
        if self._drafts and self._awaits_drafts(request):
            drafts = self._drafts.count_missing(request.prompts)
        return len(request.prompts) * request.samples + drafts

    @property
    def open_texts(self) -> int:
        """Number of completions that have no verdict yet."""
        return sum(
            (run.total - len(run.results) - len(run.failed)) * run.request.samples
            for run in self.runs.values()
        )

    def _given_prefix(self, run: EvaluationRun, seq: int) -> GroupPrefixes:
        tokens = run.request.prefix_tokens
        row = Row(
            tokens=tokens,
            logprobs=bytes(len(tokens)),  # float32 zeros, as many as int32 ids
            finish="length",
            spans=(),
            text=run.request.prefix_text,
        )
        task = self.group_task(seq)
        return GroupPrefixes(
            seq=seq,
            prompt=task.prompt,
            seed=task.seed,
            prompt_tokens=b"",
            rows=(row,) * run.request.samples,
        )

    def progress(self, name: str) -> tuple[EvaluationProgress, list[bytes]]:
        """Return the progress of an evaluation and, once finished, its encoded results."""
        run = self.runs.get(name)
        if run is None:
            return EvaluationProgress(name=name, total=-1, judged=0, failed=0), []
        payload = (
            [msgspec.msgpack.encode(run.results[seq]) for seq in sorted(run.results)]
            if run.finished
            else []
        )
        progress = EvaluationProgress(
            name=name,
            total=run.total,
            judged=len(run.results),
            failed=len(run.failed),
            unsampled=run.unsampled,
            causes=tuple((seq - run.first, cause) for seq, cause in run.failed.items()),
        )
        return progress, payload

    def counts(self) -> dict[str, int]:
        """Return the numbers of groups requested, judged and failed."""
        totals = self._forgotten.copy()
        for run in self.runs.values():
            totals.update(run.counts)
        return dict(totals)

    def forget(self, name: str) -> None:
        """Free a finished evaluation; ValueError for an unfinished one, whose groups may be leased."""
        run = self.runs.get(name)
        if run is None:
            return
        if not run.finished:
            raise ValueError(f"evaluation {name} is not finished: it cannot be forgotten")
        self._forgotten.update(run.counts)
        del self.runs[name]

    def run_of(self, seq: int) -> EvaluationRun:
        """Return the evaluation of a group."""
        return next(run for run in self.runs.values() if run.first <= seq < run.first + run.total)

    def group_task(self, seq: int) -> GroupTask:
        """Return prompt and seed of an evaluation group."""
        run = self.run_of(seq)
        request, index = run.request, seq - run.first
        seed = derive(self._run_seed, "evaluation", request.name, index)
        prompt = request.prompts[index]
        if self._drafts and request.version >= 0:
            prompt = self._drafts.with_draft(prompt)
        return GroupTask(seq, prompt, seed)

    def published(self, version: int, digest: str) -> None:
        """Note the digest of a version; a resumed run may train a version again, with another digest."""
        versions_in_use = {run.request.version for run in self.runs.values()}
        for old in [
            each
            for each in self._published
            if each <= version - VERSIONS_KEPT and each not in versions_in_use
        ]:
            del self._published[old]
        self._published[version] = digest

    def needs_version(self, version: int, digest: str) -> bool:
        """Return True if an evaluation has unleased groups to sample with these weights."""
        return self._is_meant(version, digest) and any(
            run.to_sample and run.request.version == version for run in self.runs.values()
        )

    def _is_meant(self, version: int, digest: str) -> bool:
        """Return True if the version has this digest; before any is published, version 0 fits."""
        expected = self._published.get(version)
        return expected == digest if expected is not None else version == 0

    def give_up_stranded(self, versions: Iterable[int], now_s: float) -> None:
        """Fail groups of versions that all rollouts, at `versions`, are past for `STRANDED_S`."""
        oldest = min(versions, default=UNPROVED)
        for run in self.runs.values():
            version = run.request.version
            if not run.to_sample or oldest <= version:
                run.stranded_s = None
                continue
            run.stranded_s = now_s if run.stranded_s is None else run.stranded_s
            if now_s - run.stranded_s > STRANDED_S:
                for item in run.to_sample:
                    run.fail(item, f"every rollout has passed version {version}")
                run.to_sample.clear()

    def unsampled_versions(self) -> set[int]:
        """Return versions with prefixes still to come, to which older rollouts swap first."""
        return {run.request.version for run in self.runs.values() if run.unsampled}

    def start_sampling(self, version: int, digest: str) -> SampleItem | None:
        """Return the next item for a rollout that has these weights."""
        for run in self.runs.values() if self._is_meant(version, digest) else ():
            for index, item in enumerate(run.to_sample if run.request.version == version else ()):
                if self._is_ready(run, item):
                    return run.to_sample.pop(index)
        return None

    def _is_ready(self, run: EvaluationRun, item: SampleItem | ScoreItem) -> bool:
        """Return True if all drafts that an item needs are there."""
        request = run.request
        if self._drafts is None or not self._awaits_drafts(request):
            return True
        return all(self._drafts.is_ready(request.prompts[seq - run.first]) for seq in item.seqs)

    def _awaits_drafts(self, request: Evaluate) -> bool:
        """Return True if drafts are needed: the adapter reads them, or they are the very answers."""
        if self._drafts is None:
            return False
        if request.version >= 0:
            return True
        return not request.prefix_text and self._drafts.answers_to(request.completion_sampling)

    def start_scoring(self, most_groups: int | None = None) -> ScoreItem | None:
        """Return the next item for a scorer, or at most `most` groups of it."""
        for run in self.runs.values():
            for index, item in enumerate(run.to_score):
                if not self._is_ready(run, item):
                    continue
                if later := item.seqs[most_groups or len(item.seqs) :]:
                    run.to_score[index] = item.only(later)
                else:
                    del run.to_score[index]
                return item.only(item.seqs[:most_groups])
        return None

    def give_back(self, item: SampleItem | ScoreItem, died: bool) -> None:
        """Take back an item without a result; it fails once lost with too many workers."""
        run = self.run_of(item.seqs[0])
        run.deaths[item.seqs] += died
        if run.deaths[item.seqs] >= self._attempts:
            run.fail(item, f"lost with its worker {self._attempts} times")
        elif isinstance(item, SampleItem):
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


def _check_size(request: Evaluate) -> None:
    """Raise ValueError unless an item of the evaluation fits a message."""
    tokens = max(len(token_ids(request.prefix_tokens)), request.prefix_sampling.max_new_tokens)
    size = max(request.samples, ROWS_PER_ITEM) * (
        tokens * SAMPLED_TOKEN_BYTES + len(request.prefix_text or "")
    )
    if size > MOST_TASK_BYTES:
        raise ValueError(
            f"evaluation {request.name}: {request.samples} samples of {tokens} tokens may have {size / 2**20:.0f} MiB, "
            f"allowed are {MOST_TASK_BYTES / 2**20:.0f}; ask for fewer samples at once"
        )
