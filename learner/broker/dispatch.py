"""Who gets which task, and what a result, a refusal or a loss means for ledger and evaluations.

Pure in the sense that counts: time is passed in, messages to send are collected in `outgoing`, records in the ledger.
"""

from collections import Counter
from collections.abc import Sequence

from prefixrl.common.config import RunConfig
from prefixrl.common.messages import (
    FromBroker,
    GroupTask,
    Kind,
    Prefixes,
    PrefixTask,
    Refused,
    Revoke,
    Scores,
    ScoreTask,
)
from prefixrl.common.packing import check_prefixes, check_scores, check_spans
from prefixrl.common.seeds import derive
from prefixrl.learner.broker.evaluations import Evaluations
from prefixrl.learner.broker.groups import SampleItem, ScoreItem
from prefixrl.learner.broker.ledger import Ledger
from prefixrl.learner.broker.prompts import PromptOrder
from prefixrl.learner.broker.stages import StageClock
from prefixrl.learner.broker.workers import Lease, Registry, Worker

EVALUATION_SHARE = 4
"""While training work is there too, one score task in this many is an evaluation's: low priority, yet never starved."""

LOST_TASK_S = 15.0


class Dispatcher:
    """Turns free slots into leases and results into ledger events."""

    def __init__(self, config: RunConfig, ledger: Ledger, prompts: PromptOrder, epoch: str) -> None:
        self._config = config
        self._prompts = prompts
        self._epoch = epoch
        self._numbers = 0
        self._score_tasks = 0
        self.ledger = ledger
        self.evaluations = Evaluations(config.seed, config.broker.attempts)
        self.registry = Registry(config.broker.silence_s, config.broker.stall_s)
        self.outgoing: list[tuple[bytes, FromBroker]] = []
        self.losses: Counter[str] = Counter()
        self.completions: Counter[str] = Counter(judged=0, cached=0)
        self.stages = StageClock()

    # --- giving work -------------------------------------------------------------------------------------------------

    def dispatch(self, now_s: float) -> None:
        """Fill every free slot that the window and the data allow."""
        rollouts = list(self.registry.of("rollout"))
        self.evaluations.give_up_stranded((each.version for each in rollouts), now_s)
        for worker in sorted(self.registry.of("rollout"), key=lambda each: -each.free):
            while (
                worker.phase in ("ready", "draining")
                and worker.free > 0
                and self._give_sampling(worker, now_s)
            ):
                pass
        while (
            scorer := self.registry.pick("scorer", lambda each: True, prefetch=True)
        ) is not None:
            if not self._give_scoring(scorer, now_s):
                if scorer.free > 0:
                    self._revoke_for(now_s)
                break

    def _give_sampling(self, worker: Worker, now_s: float) -> bool:
        item = self.evaluations.start_sampling(worker.version, worker.weights_digest)
        if item is not None:
            request = self.evaluations.run_of(item.seqs[0]).request
            groups = tuple(self.evaluations.group_task(seq) for seq in item.seqs)
            task = PrefixTask(
                self._name(), 0, "eval", item.version, groups, request.samples, request.prefix_sampling
            )  # fmt: skip
            self._lease(worker, item, task, now_s)
            return True
        # A draining rollout only finishes what evaluations still need of its version.
        item = self.ledger.start_sampling(worker.version) if worker.phase == "ready" else None
        if item is None:
            return False
        groups = tuple(
            GroupTask(
                seq,
                self._prompts.prompt(self.ledger.place(seq)),
                derive(self._config.seed, "group", seq),
            )
            for seq in item.seqs
        )
        sampling = self._config.rollout_sampling()
        rows = self._config.algorithm.samples_per_prompt
        self._lease(
            worker,
            item,
            PrefixTask(self._name(), 0, "train", item.version, groups, rows, sampling),
            now_s,
        )
        return True

    def _give_scoring(self, worker: Worker, now_s: float) -> bool:
        self._score_tasks += 1
        evaluation_first = self._score_tasks % EVALUATION_SHARE == 0
        item = self.evaluations.start_scoring() if evaluation_first else self.ledger.start_scoring()
        is_evaluation = evaluation_first
        if item is None:
            item = (
                self.ledger.start_scoring()
                if evaluation_first
                else self.evaluations.start_scoring()
            )
            is_evaluation = not evaluation_first
        if item is None:
            self._score_tasks -= 1
            return False
        if is_evaluation:
            sampling = self.evaluations.run_of(item.seqs[0]).request.completion_sampling
        else:
            sampling = self._config.scorer_sampling()
        if not is_evaluation:
            self.stages.leased(item.seqs, now_s)
        kind: Kind = "eval" if is_evaluation else "train"
        task = ScoreTask(
            self._name(),
            0,
            kind,
            item.version,
            item.weights_digest,
            item.groups,
            sampling,
            item.sampled_s,
        )
        self._lease(worker, item, task, now_s)
        return True

    def _name(self) -> str:
        self._numbers += 1
        return f"{self._epoch}-{self._numbers}"

    def _lease(
        self,
        worker: Worker,
        item: SampleItem | ScoreItem,
        task: PrefixTask | ScoreTask,
        now_s: float,
    ) -> None:
        worker.add(Lease(task.task, task.attempt, task.kind, item, now_s, now_s), now_s)
        self.outgoing.append((worker.identity, task))

    def _revoke_for(self, now_s: float) -> None:
        """A scorer has nothing to do: take back the youngest task that only waits behind another one."""
        lease = self.registry.prefetched("scorer")
        if lease is not None:
            lease.revoking = True
            holder = next(each for each in self.registry.of("scorer") if lease.task in each.leases)
            self.outgoing.append((holder.identity, Revoke(lease.task, lease.attempt)))

    # --- taking results ----------------------------------------------------------------------------------------------

    def take_prefixes(self, worker: Worker, result: Prefixes, now_s: float) -> None:
        """Accept a rollout's result; raises ValueError when it is not what a rollout may send."""
        lease = worker.leases.pop(result.task, None)
        try:
            for group in result.groups:
                check_prefixes(group, self._rows_asked(lease, result.kind, len(group.rows)))
            if lease:
                _check_answers(lease, result)
                _check_version(lease, result, self._may_cross(result.kind))
            for group in result.groups:
                check_spans(group, result.version, self._may_cross(result.kind))
        except ValueError:
            if lease:
                self._return(lease, died=True)
            raise
        worker.tasks_done += 1
        if result.kind == "train":
            taken = self.ledger.take_prefixes(
                result.groups, result.version, result.weights_digest, result.elapsed_s
            )
            self.stages.sampled(taken, now_s)
        elif lease and isinstance(lease.item, SampleItem):
            self.evaluations.take_prefixes(
                lease.item, result.groups, result.weights_digest, result.elapsed_s
            )
        self._return_missing(lease, {group.seq for group in result.groups})

    def take_scores(self, worker: Worker, result: Scores, now_s: float) -> None:
        """Accept a scorer's result; raises ValueError when it is not what a scorer may send."""
        lease = worker.leases.pop(result.task, None)
        try:
            for group in result.groups:
                rows = len(group.prefixes.rows)
                asked = self._rows_asked(lease, result.kind, rows)
                check_scores(
                    group, asked, self._config.scorer.texts_per_row(result.kind), result.kind
                )
                if result.kind == "train" and group.version < 0:
                    raise ValueError(f"training group {group.prefixes.seq} has no version")
                check_spans(group.prefixes, group.version, self._may_cross(result.kind))
            if lease:
                _check_answers(lease, result)
        except ValueError:
            if lease:
                self._return(lease, died=True)
            raise
        worker.tasks_done += 1
        if lease:
            texts = [text for group in result.groups for text in group.texts]
            self.completions["judged"] += len(texts)
            self.completions["cached"] += sum(text.was_cached for text in texts)
        if result.kind == "train":
            # Not leased here (any more): the groups carry all it takes to judge whether they may still be used.
            self.stages.scored(self.ledger.take_scores(result.groups), now_s)
        elif lease:
            self.evaluations.take_scores(result.groups)
        self._return_missing(lease, {group.prefixes.seq for group in result.groups})

    def _rows_asked(self, lease: Lease | None, kind: Kind, rows: int) -> int:
        """Rows that a group of a result must have; of an evaluation's that nobody waits for any more, those it has."""
        if kind == "train":
            return self._config.algorithm.samples_per_prompt
        if lease is None or lease.kind != "eval":
            return rows
        return self.evaluations.rows_per_group(lease.item.seqs)

    def _may_cross(self, kind: Kind) -> bool:
        """Whether one answer may be of several versions: an evaluation is of one, always."""
        return kind == "train" and self._config.rollout.swap == "in_flight"

    def _return_missing(self, lease: Lease | None, delivered: set[int]) -> None:
        """Groups of the lease that the result leaves out go back to the queue, counted against their attempts."""
        if lease is None or delivered.issuperset(lease.item.seqs):
            return
        item = lease.item
        if isinstance(item, SampleItem):
            left = tuple(seq for seq in item.seqs if seq not in delivered)
            lease.item = SampleItem(left, item.version)
        else:
            groups = tuple(group for group in item.groups if group.seq not in delivered)
            lease.item = ScoreItem(groups, item.version, item.weights_digest, item.sampled_s)
        self._return(lease, died=True)

    def take_refusal(self, worker: Worker, refusal: Refused) -> None:
        """A worker hands a lease back unworked."""
        lease = worker.leases.pop(refusal.task, None)
        if lease is not None:
            self._return(lease, died=False)

    def needs_version(self, worker: Worker) -> bool:
        """Whether a rollout's open leases must end with the version they began with."""
        if self._config.rollout.swap == "drain":
            return bool(worker.leases)
        return any(lease.kind == "eval" for lease in worker.leases.values())

    def reconcile(self, worker: Worker, held: Sequence[str], now_s: float) -> None:
        """Take back leases a worker does not hold although it should: the task or its result was lost on the way.

        The patience is longer than a worker takes to send an unacknowledged result again.
        """
        for lease in list(worker.leases.values()):
            if lease.task in held:
                lease.held_s = now_s
            elif now_s - lease.held_s > LOST_TASK_S:
                del worker.leases[lease.task]
                self.losses[f"{worker.role}: task lost on the way"] += 1
                self._return(lease, died=False)

    def lose(self, worker: Worker, reason: str, died: bool) -> Sequence[str]:
        """Give a worker up: its leases go back. Returns the names of the tasks it held."""
        self.registry.by_identity.pop(worker.identity, None)
        self.losses[f"{worker.role}: {'lost' if died else 'left'}"] += 1
        return self.return_leases(worker, died)

    def return_leases(self, worker: Worker, died: bool = False) -> list[str]:
        """Put everything a worker holds back into the queues; returns the names of the tasks."""
        held = list(worker.leases)
        for lease in worker.leases.values():
            self._return(lease, died)
        worker.leases.clear()
        return held

    def _return(self, lease: Lease, died: bool) -> None:
        if lease.kind == "eval":
            self.evaluations.give_back(lease.item, died)
        else:
            self.ledger.give_back(lease.item, died)


def _check_version(lease: Lease, result: Prefixes, may_cross: bool) -> None:
    """Raise ValueError unless a result is of its task's version; where answers may cross, one that waited may be newer."""
    is_newer = may_cross and result.version > lease.item.version
    if result.version != lease.item.version and not is_newer:
        raise ValueError(
            f"prefixes of version {result.version} for a task at version {lease.item.version}"
        )


def _check_answers(lease: Lease, result: Prefixes | Scores) -> None:
    """Raise ValueError unless a result is of the kind of its task and of nothing but its groups.

    A group number means one thing in an evaluation and another in the ledger: neither may reach the other's books.
    """
    if isinstance(result, Prefixes):
        seqs = [group.seq for group in result.groups]
    else:
        seqs = [group.prefixes.seq for group in result.groups]
    if result.kind != lease.kind or isinstance(result, Prefixes) != isinstance(
        lease.item, SampleItem
    ):
        raise ValueError(
            f"a {result.kind} result {type(result).__name__} for the {lease.kind} task {lease.task}"
        )
    strange = sorted(set(seqs) - set(lease.item.seqs))
    if strange or len(set(seqs)) < len(seqs):
        raise ValueError(
            f"result of task {lease.task} holds groups {seqs}, the task holds {list(lease.item.seqs)}"
        )
