"""Tasks for workers, and the effect of results and losses on ledger and evaluations.

Pure: time is passed in, messages to send are collected in the outbox, records in the ledger.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.models.config_file import embedding_rows
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    GroupTask,
    Sampling,
    ScoredGroup,
    TargetText,
    TaskKind,
)
from prefixrl.common.wire.messages.worker import (
    Prefixes,
    PrefixTask,
    Refused,
    Revoke,
    Scores,
    ScoreTask,
)
from prefixrl.common.wire.packing import (
    MOST_CHARS_PER_TOKEN,
    GroupLimits,
    check_prefixes,
    check_spans,
    check_verdicts,
)
from prefixrl.common.worker.allowance import Allowance, RateLimits
from prefixrl.learner.broker.groups.answers import KeptAnswers
from prefixrl.learner.broker.groups.drafts import Drafts
from prefixrl.learner.broker.groups.evaluations import EvaluationQueue
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import PromptSource, SampleItem, ScoreItem
from prefixrl.learner.broker.outbox import Outbox
from prefixrl.learner.broker.workers.registry import Registry
from prefixrl.learner.broker.workers.stage_clock import StageClock
from prefixrl.learner.broker.workers.task_names import TaskNames, content, version_of
from prefixrl.learner.broker.workers.task_order import Kind, kind_of
from prefixrl.learner.broker.workers.workers import Lease, Phase, Worker

StartScoring = Callable[[int | None], ScoreItem | None]
"""Takes the next item of a queue, of so many groups at most."""
ScoringQueues = list[tuple[TaskKind, StartScoring]]
EVALUATION_SHARE = 4
"""One score task in so many is for an evaluation while there is training work too: neither starves. While a run trains,
evaluations also hold one seat in so many (or one task): training work that comes later would share each step with the
rows of all other seats, and wait for the prefill of their prompts."""
LOST_TASK_S = 15.0
"""Time after which a lease ends that its worker does not report. An unacknowledged result is sent again sooner."""
UNKNOWN_VOCABULARY = 2**20
"""Bound where no config.json of the adapter names a vocabulary: more tokens than any model has."""
VERIFICATION = 1
"""Progress that a scorer reports for a text that was verified."""
MOST_LOST_TASKS = 3
"""Tasks that a worker may lose before it delivers another result, per task that it has held at once."""
RESULT_SHARE = 0.5
"""Part of `learner.batch_timeout_s` in which a training task needs a result. The rest is enough to do it again."""


class Dispatcher:
    """Turns free rows into leases and results into ledger events."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        prompts: PromptSource,
        names: TaskNames,
        answers: KeptAnswers,
        drafts: Drafts | None,
    ) -> None:
        """`drafts`: those that `prompts` hold, where the adapter reads any."""
        self._config, self._prompts, self._names = config, prompts, names
        self.answers, self.drafts = answers, drafts
        self._drafted_until = 0
        """Position in the order of prompts up to which drafts were requested."""
        self._limits = limits_of(config)
        self._sampling = config.rollout_sampling(), config.scorer_sampling()
        """Settings of prefixes, and of completions, in training."""
        self._score_tasks = 0
        self.ledger = ledger
        self.evaluations = EvaluationQueue(config.seed, config.broker.attempts, drafts)
        # After a restart groups may wait to be sampled again: their drafts are needed first.
        self._request_drafts(ledger.unsampled_places)
        self._result_s = max(config.broker.stall_s, RESULT_SHARE * config.learner.batch_timeout_s)
        if config.scorer.is_served:
            # A scorer may wait so long for its endpoint.
            self._result_s = max(self._result_s, config.scorer.openai.patience_s)
        self.allowance = Allowance(RateLimits.of_run(config), config.broker.heartbeat_s)
        """Requests that scorers may make to the target's endpoint."""
        self.registry = Registry(
            config.broker.silence_s, config.broker.stall_s, config.broker.heartbeat_s
        )
        # The work of a usual training task: a larger task of an evaluation has more time.
        rows = config.rollout.groups_per_task * config.algorithm.samples_per_prompt
        self._usual_work = {
            "rollout": rows * self._sampling[0].max_new_tokens,
            "scorer": self._scoring_work(rows, "train", self._sampling[1]),
        }
        self.outbox = Outbox()
        self.losses = Counter[str]()
        self.completions = Counter[str](judged=0, cached=0)
        self.last_event, self.event_s = "", -math.inf
        self.stages = StageClock()

    def dispatch(self, now_s: float) -> None:
        """Fill every free seat, and the room behind it, that the window and the data allow."""
        is_drafting = self.drafts and not self.ledger.is_closed
        upcoming = self.ledger.upcoming if is_drafting else range(0)
        self._request_drafts(range(max(upcoming.start, self._drafted_until), upcoming.stop))
        self._drafted_until = max(self._drafted_until, upcoming.stop)
        self.ledger.admission.supply = self.registry.supply(self._config.rows_per_job("scorer"))
        if self.evaluations.runs:
            self.evaluations.give_up_stranded(
                (each.version for each in self.registry.workers_of("rollout")), now_s
            )
        # If the queue refuses one rollout, it refuses all rollouts of that kind.
        refused: set[Kind] = set()
        while (rollout := self.registry.pick("rollout", refused)) is not None:
            if not self._give_sampling(rollout, now_s):
                refused.add(kind_of(rollout))
        while (scorer := self.registry.pick("scorer")) is not None:
            if not self._give_scoring(scorer, now_s):
                # No queue has work for this free seat, so work that waits behind another worker's
                # seats is called back.
                if (youngest := self.registry.revocable("scorer")) is not None:
                    holder, lease = youngest
                    lease.revoking = True
                    self.outbox.add_task(holder.identity, Revoke(lease.task))
                break

    @property
    def open_texts(self) -> int:
        """Number of completions that will still be asked for, or are being written."""
        algorithm, scorer = self._config.algorithm, self._config.scorer
        states = self.ledger.states()
        unscored = sum(states.get(state, 0) for state in ("queued", "sampling", "sampled"))
        texts = unscored * algorithm.samples_per_prompt * scorer.continuations
        leases = (
            lease
            for worker in self.registry.workers_of("scorer")
            for lease in worker.leases.values()
        )
        texts += sum(lease.open_rows for lease in leases if lease.kind == "train")
        if self.drafts:
            texts += self.drafts.total.waiting
        return texts + self.evaluations.open_texts

    def end_drafting(self) -> None:
        """Ask for no draft any more but those that live groups and evaluations wait for."""
        if self.drafts:
            of_groups = map(self._prompts.prompt, self.ledger.unsampled_places)
            needed = chain(of_groups, self.evaluations.drafted_prompts())
            self.drafts.withdraw_drafts(needed, also_training=True)

    def _request_drafts(self, places: Iterable[int]) -> None:
        if self.drafts:
            self.drafts.request_drafts(map(self._prompts.prompt, places), for_training=True)

    def _give_sampling(self, worker: Worker, now_s: float) -> bool:
        kind: TaskKind = "eval"
        # Evaluations first: they need this very version, and hold back the swap to the next one.
        item = self.evaluations.start_sampling(worker.version, worker.weights_digest)
        if item is not None:
            request = self.evaluations.run_of(item.seqs[0]).request
            rows, sampling = request.samples, request.prefix_sampling
            groups = tuple(self.evaluations.group_task(seq) for seq in item.seqs)
        else:
            # A draining rollout only finishes what evaluations still need of its version.
            most = None if worker.takes_runs else 1
            item = (
                self.ledger.start_sampling(worker.version, most)
                if worker.phase is Phase.READY
                else None
            )
            if item is None:
                return False
            kind = "train"
            rows = self._config.algorithm.samples_per_prompt
            sampling = self._sampling[0]
            groups = tuple(
                # The seed follows from the group alone: draws are the same at every rollout.
                GroupTask(
                    seq,
                    self._prompts.prompt(self.ledger.prompt_index(seq)),
                    derive(self._config.seed, "group", seq),
                )
                for seq in item.seqs
            )
        task = PrefixTask(
            task="",
            kind=kind,
            version=item.version,
            groups=groups,
            rows_per_group=rows,
            sampling=sampling,
        )
        rows *= len(groups)
        self._lease(worker, item, task, rows, rows * sampling.max_new_tokens, now_s)
        return True

    def _give_scoring(self, worker: Worker, now_s: float) -> bool:
        most = None if worker.takes_runs else 1
        queues = self._scoring_queues(worker)
        # Lazily, queue by queue: asking a queue takes the item out of it.
        work = ((kind, item) for kind, start in queues if (item := start(most)) is not None)
        if (next_work := next(work, None)) is None:
            return False
        kind, item = next_work
        self._score_tasks += 1
        answers: tuple[TargetText | None, ...] = ()
        # Answers that are kept need no target any more: the scorer only judges them.
        if kind == "eval":
            sampling = self.evaluations.run_of(item.seqs[0]).request.completion_sampling
            answers = self.answers.texts_of(item.groups, sampling)
        elif kind == "draft":
            assert self.drafts is not None
            sampling = self.drafts.sampling
        else:
            sampling = self._sampling[1]
            self.stages.leased(item.seqs, now_s)
        task = ScoreTask(
            task="",
            kind=kind,
            version=item.version,
            weights_digest=item.weights_digest,
            groups=item.groups,
            sampling=sampling,
            sampled_s=item.sampled_s,
            answers=answers,
        )
        rows = sum(len(group.rows) for group in item.groups)
        texts = rows * self._config.scorer.texts_per_row(kind)
        self._lease(worker, item, task, texts, self._scoring_work(rows, kind, sampling), now_s)
        return True

    def _scoring_queues(self, worker: Worker) -> ScoringQueues:
        """Return the queues that a scorer may get work from, the first one first."""
        # A draft is one row, and the groups that wait for it are none of a scorer's work yet.
        training: ScoringQueues = [("train", self.ledger.start_scoring)]
        evaluating: ScoringQueues = [("eval", self.evaluations.start_scoring)]
        if drafts := self.drafts:
            training.insert(0, ("draft", lambda _: drafts.start_scoring(for_training=True)))
            evaluating.insert(0, ("draft", lambda _: drafts.start_scoring(for_training=False)))
        evaluation_texts = sum(
            lease.open_rows for lease in worker.leases.values() if lease.kind != "train"
        )
        may_evaluate = (
            worker.takes_runs
            or evaluation_texts < worker.seats / EVALUATION_SHARE
            or not self.ledger.is_training
        )
        if not may_evaluate:
            return training
        is_their_turn = (self._score_tasks + 1) % EVALUATION_SHARE == 0
        return evaluating + training if is_their_turn else training + evaluating

    def _scoring_work(self, rows: int, kind: TaskKind, sampling: Sampling) -> int:
        tokens = sampling.max_new_tokens + self._config.scorer.most_extension_tokens
        return rows * self._config.scorer.texts_per_row(kind) * (tokens + VERIFICATION)

    def _lease(
        self,
        worker: Worker,
        item: SampleItem | ScoreItem,
        task: PrefixTask | ScoreTask,
        rows: int,
        work: int,
        now_s: float,
    ) -> None:
        task_content = content(task)
        name = self._names.name(worker.holder, task.version, task_content)
        # An evaluation task may be larger. Its limit grows in proportion.
        most_s = self._result_s * (
            max(1.0, work / self._usual_work[worker.role]) if task.kind == "eval" else 1.0
        )
        if worker.role == "scorer" and self.allowance.is_limited:
            # Its rows have their turns behind all others.
            scorers = self.registry.workers_of("scorer")
            most_s += self.allowance.least_s(rows + sum(each.open_rows for each in scorers))
        worker.add(
            Lease(name, task.kind, item, now_s, now_s, task_content, rows, rows, most_s=most_s),
            now_s,
        )
        self.outbox.add_task(worker.identity, msgspec.structs.replace(task, task=name))

    def take_prefixes(self, worker: Worker, result: Prefixes, now_s: float) -> None:
        """Accept a rollout's result; ValueError, changing nothing, when it may not send this one."""
        lease = self._lease_of(worker, result)
        if lease is None and result.kind == "eval":
            return
        self._check_prefixes(lease, result)
        if result.kind == "train":
            accepted = self.ledger.take_prefixes(
                result.groups, result.version, result.weights_digest, result.elapsed_s
            )
            self.stages.came_in(accepted, now_s)
        elif lease and isinstance(lease.item, SampleItem):
            self.evaluations.take_prefixes(
                lease.item, result.groups, result.weights_digest, result.elapsed_s
            )
        worker.finish(result.task)
        self.note_event(f"{worker.name} sampled {len(result.groups)} groups", now_s)

    def take_scores(self, worker: Worker, result: Scores, now_s: float) -> list[ScoredGroup]:
        """Accept a scorer's result and return its groups that wait for a batch now.

        ValueError, changing nothing, when the worker may not send this result.
        """
        lease = self._lease_of(worker, result)
        # Late: its item was given to another worker, or the evaluation is over.
        if lease is None and result.kind == "eval":
            return []
        self._check_scores(lease, result)
        if lease and result.kind != "draft":
            for group in result.groups:
                texts = group.texts
                self.completions["judged"] += len(texts)
                self.completions["cached"] += [text.was_cached for text in texts].count(True)
        accepted: list[ScoredGroup] = []
        if result.kind == "train":
            accepted = self.ledger.take_scores(result.groups)
            self.stages.came_in((group.prefixes.seq for group in accepted), now_s)
        elif result.kind == "eval" and lease:
            self.evaluations.take_scores(result.groups)
            sampling = self.evaluations.run_of(lease.item.seqs[0]).request.completion_sampling
            self.answers.keep_evaluated(result.groups, sampling)
        elif self.drafts:
            # Also of an earlier broker's task: nothing but the question counts.
            self.drafts.take_scores(result.groups, result.prompt_tokens)
        worker.finish(result.task)
        self.note_event(f"{worker.name} judged {len(result.groups)} groups", now_s)
        return accepted

    def note_event(self, event: str, now_s: float) -> None:
        """Record progress for the stall report."""
        self.last_event, self.event_s = event, now_s

    def _lease_of(self, worker: Worker, result: Prefixes | Scores) -> Lease | None:
        """Return a result's lease, None for a late one; ValueError unless its worker held that task unchanged."""
        lease, answered = worker.leases.get(result.task), content(result)
        if lease is None and not self._names.proves(result.task, worker.holder, answered):
            raise ValueError(
                f"{type(result).__name__} of {len(result.groups)} groups for the task {result.task}: this worker was "
                f"given no such task with these groups, prompts, seeds and prefixes"
            )
        if lease is not None and lease.content != answered:
            raise ValueError(
                f"{_difference(lease, result)}; it must answer exactly what it was given"
            )
        return lease

    def _check_prefixes(self, lease: Lease | None, result: Prefixes) -> None:
        # An answer in training may be of several versions. An answer of an evaluation never is.
        task_version = version_of(result.task)
        may_cross = result.kind == "train" and self._config.rollout.swap == "in_flight"
        if result.version != task_version and not (may_cross and result.version > task_version):
            raise ValueError(
                f"prefixes of version {result.version} for a task at version {task_version}"
            )
        rows, limits = self._config.algorithm.samples_per_prompt, self._limits
        if lease and lease.kind == "eval":
            request = self.evaluations.run_of(lease.item.seqs[0]).request
            rows, limits = (
                request.samples,
                replace(limits, row_tokens=request.prefix_sampling.max_new_tokens),
            )
        for group in result.groups:
            check_prefixes(group, rows, limits=limits)
            check_spans(group, result.version, may_cross)

    def _check_scores(self, lease: Lease | None, result: Scores) -> None:
        """Raise ValueError unless the verdicts fit; the prefixes were checked when they came in."""
        prefix, completion = self._sampling
        if lease and lease.kind == "eval":
            request = self.evaluations.run_of(lease.item.seqs[0]).request
            prefix, completion = request.prefix_sampling, request.completion_sampling
        scorer, most = self._config.scorer, 0
        if result.kind != "train" or scorer.keep_completions:
            tokens = (
                prefix.max_new_tokens + completion.max_new_tokens + scorer.most_extension_tokens
            )
            most = MOST_CHARS_PER_TOKEN * tokens
        texts, has_step_rewards = (
            scorer.texts_per_row(result.kind),
            scorer.prm and scorer.prm.placement == "step",
        )
        for group in result.groups:
            check_verdicts(group, texts, result.kind, most, bool(has_step_rewards))

    def take_refusal(self, worker: Worker, refusal: Refused) -> None:
        """Return a lease that its worker did not work on to its queue."""
        lease = worker.drop(refusal.task)
        if lease is not None:
            self._return(lease, died=False)

    def take_back(self, identity: bytes, task: str) -> None:
        """Return a task that cannot be sent, counted against the attempts of its groups."""
        worker = self.registry.by_identity.get(identity)
        lease = worker.drop(task) if worker else None
        if lease is not None:
            self._return(lease, died=True)

    def reconcile(self, worker: Worker, tasks: Sequence[str], now_s: float) -> None:
        """Take back leases that a worker does not hold: the task or its result was lost on the way.

        ValueError for a worker that loses many tasks without a result in between, or keeps one for too long.
        """
        reported = set(tasks)
        worker.time_front(now_s)
        # Late because it was away, it is given up without blame, by `Registry.lost`.
        if late := worker.overdue(now_s, counts_away=False):
            raise ValueError(
                f"no result of the {late.kind} task {late.task} within {late.most_s:g} s, whatever it reports: the "
                f"limit of a training task is half of learner.batch_timeout_s, an evaluation's is as much longer "
                f"as the task is larger"
            )
        for lease in list(worker.leases.values()):
            if lease.task in reported:
                lease.reported_s = now_s
            elif now_s - lease.reported_s > LOST_TASK_S:
                # A heartbeat may have crossed the task on its way, so only a lasting gap is a loss.
                worker.tasks_lost += 1
                if worker.tasks_lost > MOST_LOST_TASKS * worker.most_leases:
                    raise ValueError(
                        f"{worker.tasks_lost} tasks sent to it were not on its list, and no result came"
                    )
                worker.drop(lease.task)
                self.losses[f"{worker.role}: task lost on the way"] += 1
                self._return(lease, died=False)

    def lose_worker(self, worker: Worker, reason: str, died: bool) -> Sequence[str]:
        """Give a worker up and put its leases back; return the names of the tasks it held."""
        self.registry.remove(worker)
        self.allowance.forget_holder(worker.identity)
        self.losses[f"{worker.role}: {'lost' if died else 'left'}"] += 1
        return self.return_leases(worker, died)

    def return_leases(self, worker: Worker, died: bool = False) -> list[str]:
        """Put everything a worker holds back into the queues; return the names of the tasks."""
        leases = [lease for task in list(worker.leases) if (lease := worker.drop(task)) is not None]
        for lease in leases:
            self._return(lease, died)
        return [lease.task for lease in leases]

    def _return(self, lease: Lease, died: bool) -> None:
        if lease.kind == "draft":
            assert self.drafts is not None
            self.drafts.give_back(lease.item, died)
        else:
            queue = self.ledger if lease.kind == "train" else self.evaluations
            queue.give_back(lease.item, died)

    def drafts_in_words(self, now_s: float) -> str:
        """Name the drafts that groups wait for, and the scorers that have them; "" where none holds a group up."""
        if self.drafts is None or not self.ledger.lacks_draft:
            return ""
        holders = [
            f"{worker.name} on {worker.host} for {now_s - lease.since_s:.0f} s"
            for worker in self.registry.by_identity.values()
            for lease in worker.leases.values()
            if lease.kind == "draft"
        ]
        more = f" and {len(holders) - 1} more tasks" if len(holders) > 1 else ""
        place = f"{holders[0]}{more}" if holders else "queued, for any scorer"
        return f"drafts of the target for {self.drafts.total.waiting} problems ({place})"


def limits_of(config: RunConfig) -> GroupLimits:
    """Return the most that a group of training may hold, by the config and the adapter's model."""
    if not config.rollout.has_tokenizer:
        # Its tokens are bytes and versions, its prompts have no limit, and no model reads them.
        return GroupLimits(row_tokens=config.max_sampled_tokens)
    vocabulary = embedding_rows(config.adapter.model) or UNKNOWN_VOCABULARY
    return GroupLimits(config.rollout.max_prompt_tokens, config.max_sampled_tokens, vocabulary)


def _difference(lease: Lease, result: Prefixes | Scores) -> str:
    """Name the first difference between a result and its task."""
    groups = [
        group if isinstance(group, GroupPrefixes) else group.prefixes for group in result.groups
    ]
    seqs = [group.seq for group in groups]
    if result.kind != lease.kind or isinstance(result, Prefixes) != isinstance(
        lease.item, SampleItem
    ):
        return (
            f"a {result.kind} result {type(result).__name__} for the {lease.kind} task {lease.task}"
        )
    # Contents can be compared one by one only where the groups are the same.
    if seqs != list(lease.item.seqs):
        return f"result of task {lease.task} holds groups {seqs}, the task holds {list(lease.item.seqs)}"
    changed = [
        seq
        for seq, was, now in zip(seqs, lease.content[1], content(result)[1], strict=True)
        if was != now
    ]
    parts = "prompt or seed" if isinstance(result, Prefixes) else "prefixes, version or weights"
    return f"result of task {lease.task} holds another {parts} in groups {changed}"
