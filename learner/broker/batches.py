"""Answers to learner ranks: batches, their groups, or the reason why a batch is not ready.

    rank ── GetBatch ──▶ batch of the ledger, described once ── Batch: lengths and rewards of all groups ──▶ rank
    rank: the plan of the iteration, which rows are its own
    rank ── GetGroups ─▶ ledger.results ── Groups: tokens and verdicts of those groups ──▶ rank

Every rank makes the plan, and all the same one: it takes a core for up to a second.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import msgspec
import xxhash

from prefixrl.common.config.algorithm import FilterConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.status import LearnerPhase
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages import learner as messages
from prefixrl.common.wire.messages.fields import row_figures
from prefixrl.common.wire.messages.groups import (
    UNJUDGED,
    BatchGroup,
    Row,
    ScoredGroup,
    StageTimes,
    Verdict,
)
from prefixrl.common.wire.messages.worker import MemoryUse
from prefixrl.common.wire.packing import TOKEN_BYTES
from prefixrl.common.wire.transport import Payload
from prefixrl.learner.broker.groups.filtering import PassRate, Starved
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen
from prefixrl.learner.broker.outbox import Answer
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.run.fractions import batch_fractions

NAMED_GROUPS = 2


@dataclass(frozen=True)
class Awaited:
    """The reason why a batch is not ready: a word for the metrics, a text for a person."""

    cause: Literal["rollouts", "scorers", "report"]
    text: str
    is_short: bool = False
    """True if too few groups are scored; False if a group that is due is missing."""


def awaited_groups(ledger: Ledger, text: str) -> Awaited:
    """Return the wait for groups; `text` describes it."""
    states, batch_groups = ledger.states(), ledger.window.batch_groups
    sampled = sum(states.get(state, 0) for state in ("sampled", "scoring", "scored"))
    return Awaited(
        "scorers" if sampled >= batch_groups or ledger.lacks_draft else "rollouts",
        text,
        states.get("scored", 0) < batch_groups,
    )


def groups_in_words(dispatcher: Dispatcher, wait: NotYetChosen, now_s: float) -> str:
    """Name the groups that an iteration waits for, and the workers that hold them."""
    registry, rate, passed = dispatcher.registry, dispatcher.ledger.pass_rate, ""
    if rate and rate.judged:
        passed = f"; {rate.passed} of the last {rate.judged} judged groups passed the filter"
    # No named groups: there are too few. Drafts hold them up, or rollouts have to sample more.
    if not wait.for_seqs and (drafts := dispatcher.drafts_in_words(now_s)):
        return f"{drafts}{passed}"
    if not wait.for_seqs:
        rollouts = [
            f"{each.name} ({each.phase}, version {each.version})"
            for each in registry.workers_of("rollout")
        ]
        return f"prefixes from {', '.join(rollouts) or 'any rollout: none is connected'}{passed}"
    first, more = wait.for_seqs[:NAMED_GROUPS], len(wait.for_seqs) - NAMED_GROUPS
    # Only leases of training count: groups of evaluations and drafts have numbers of their own.
    holders = {
        seq: f"{worker.name} on {worker.host} for {now_s - lease.since_s:.0f} s"
        for worker in registry.by_identity.values()
        for lease in worker.leases.values()
        if lease.kind == "train"
        for seq in lease.item.seqs
        if seq in first
    }
    states = {group.seq: group.state for group in dispatcher.ledger.live() if group.seq in first}
    descriptions = [
        f"{seq} ({states.get(seq, 'ended')}, {holders.get(seq, 'queued')})" for seq in first
    ]
    return f"groups {', '.join(descriptions)}{f' and {more} more' if more > 0 else ''}{passed}"


def why_no_batch(ledger: Ledger, limits: FilterConfig, iteration: int, starved: Starved) -> str:
    """Explain why an iteration never gets its batch, and what the user can do."""
    causes = ", ".join(f"{count} {cause}" for cause, count in ledger.counts.causes.items())
    newest = f"; the newest error: {ledger.newest_error}" if ledger.newest_error else ""
    ended = f"(ended so far: {causes or 'nothing'}{newest})"
    failures = ledger.failures
    if starved.why == "failures":
        return (
            f"iteration {iteration} gets no batch: {failures.failed_fraction:.0%} of the rows of the last "
            f"{len(failures.newest)} groups could not be sampled or judged, more than broker.max_failure_share = "
            f"{failures.most:g} {ended}; mend what fails, or raise the limit"
        )
    return f"iteration {iteration} gets no batch: {_nothing_passed(limits, ledger.pass_rate, starved)} {ended}"


def _nothing_passed(limits: FilterConfig, rate: PassRate | None, starved: Starved) -> str:
    if rate is None:
        return "all problems are used up and none could be sampled and judged"
    keys, remedies = [], []
    if limits.accuracy is not None:
        keys.append(f"filter.accuracy = [{limits.accuracy[0]:g}, {limits.accuracy[1]:g}]")
        remedies.append("widen the band, raise algorithm.samples_per_prompt")
    if limits.truncated is not None:
        keys.append(f"filter.truncated = {limits.truncated!r}")
        remedies.append("raise the length limit")
    share = f"{rate.passed} of the last {rate.judged} judged groups passed {' and '.join(keys)}"
    remedy = f"{', '.join(remedies)}, or train on other problems"
    if starved.why == "data":
        return f"all problems are used up and {share}; {remedy}"
    lower = ", lower filter.min_pass_rate" if rate.passed else ""
    return (
        f"{share}, fewer than filter.min_pass_rate = {limits.min_pass_rate:g} of them or none; {remedy}, or move "
        f"the limit (raise filter.limit_batches{lower})"
    )


log = logging.getLogger(__name__)

NOT_YET_EVERY_S = 1.0


class BatchAnswers:
    """The ranks that wait for a batch, and their answers: one each `NOT_YET_EVERY_S` at least, as a sign of life."""

    def __init__(
        self, config: RunConfig, dispatcher: Dispatcher, problems: int, start: Start
    ) -> None:
        self._config = config
        self._ranks = start.ranks
        self._dispatcher = dispatcher
        self.total_iterations = config.iterations_in_all(problems)
        self._waiting: dict[bytes, tuple[messages.GetBatch, float]] = {}
        self._resumed_at = start.iteration if start.is_restart else -1
        """Iteration that ranks may have begun with an earlier broker; -1: no such iteration."""
        self._looked_s = 0.0
        self._waited_s: dict[str, float] = {}
        self._done_s: float | None = None
        """Time at which the newest iteration was finished; None before the first."""
        self._is_short = False
        """True if at the last look ranks waited because too few groups were scored."""
        self._short_s = 0.0
        """Seconds of that wait since the newest iteration was finished."""
        self._newest: tuple[int, tuple[BatchGroup, ...], dict[str, float]] | None = None
        """Iteration handed out last, its groups and waiting times: the same for every rank."""
        self._facts: dict[int, BatchGroup] = {}
        """Descriptions of scored groups for ranks, by sequence number."""
        self._is_new = False
        """True if the newest call of `answers` formed that batch."""
        self.is_halting = False
        """True once a rank, or the operator, wants all ranks to save and end."""
        self.ending = ""
        """The reason why no new group is begun, and the run ends in order; "" before."""
        self.waiting_for = ""
        self._worded = -1, -math.inf, ""
        """The iteration that waits for groups, the time of the newest text about them, that text."""
        self.phase: LearnerPhase = "loading"
        """The phase of rank 0, as its messages show it."""
        self._waits_from_s: float | None = None
        """Start of rank 0's wait for its batch; None while it does not wait."""
        self._no_more: messages.CannotGoOn | None = None
        """The reason to end, sent to every rank once one rank got it: a rank that has a batch would hang."""
        self.memory: dict[int, MemoryUse | None] = {}
        """Memory of each rank when it last asked for a batch."""
        self.truncated_fraction = 0.0
        """Fraction of texts of the newest batch that were cut by the length limit."""

    def take_request(self, peer: bytes, request: messages.GetBatch, now_s: float) -> None:
        """Take a rank's request in place of its earlier one; ValueError for a rank number that the run lacks."""
        if request.ranks != self._ranks or not 0 <= request.rank < self._ranks:
            raise ValueError(
                f"rank {request.rank} of {request.ranks} asks for a batch, this run has {self._ranks}, rank 0 "
                f"first: start every rank with the same number of ranks"
            )
        self._waiting[peer] = (request, now_s)
        self.memory[request.rank] = request.memory
        self.is_halting |= request.is_stopping

    def halt(self, reason: str) -> None:
        """Halt all ranks, as if one of them had been asked to stop."""
        if not self.is_halting:
            log.info("the ranks are asked to save and end: %s", reason)
        self.is_halting = True

    def answers(self, now_s: float) -> dict[bytes, Answer]:
        """Return the answers that are due. Write the ledger's new records before you send them."""
        answers: dict[bytes, Answer] = {}
        self._is_new = False
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        # Credited late: only now is it known how long the state of the last call lasted.
        self._short_s += passed_s * self._is_short
        self._is_short = False
        waits: dict[str, float] = {}
        for peer, (request, since_s) in list(self._waiting.items()):
            answer = self._answer(request, now_s)
            if request.rank == 0:
                self._note_phase(answer, now_s)
            if isinstance(answer, Awaited):
                self.waiting_for = answer.text
                self._is_short |= answer.is_short
                # Ranks wait at the same time: the longest wait counts, not the sum.
                waits[answer.cause] = max(
                    waits.get(answer.cause, 0.0), min(passed_s, now_s - since_s)
                )
                if now_s - since_s > NOT_YET_EVERY_S:
                    answers[peer] = messages.NotYet(request.iteration, self.waiting_for), []
                continue
            self.waiting_for = ""
            # The iteration is trained already: this is a late repetition, which needs no answer.
            if answer is None:
                del self._waiting[peer]
            else:
                answers[peer] = answer
        for peer in answers:
            del self._waiting[peer]
        for cause, wait_s in waits.items():
            self._waited_s[cause] = self._waited_s.get(cause, 0.0) + wait_s
        return answers

    def put_off(self, obstacle: str, now_s: float) -> dict[bytes, Answer]:
        """Answer every waiting rank with a halt, or with `obstacle` as a sign of life."""
        self._looked_s = now_s
        self._is_short = False
        self.waiting_for = obstacle
        answers: dict[bytes, Answer] = {}
        for peer, (request, since_s) in list(self._waiting.items()):
            if self._must_halt(request.iteration):
                answers[peer] = messages.Halt(request.iteration), []
                continue
            if request.rank == 0:
                self._note_wait(now_s)
            if now_s - since_s > NOT_YET_EVERY_S:
                answers[peer] = messages.NotYet(request.iteration, obstacle), []
        for peer in answers:
            del self._waiting[peer]
        return answers

    def describe(self, accepted: Sequence[ScoredGroup]) -> None:
        """Describe groups as they are scored: doing all of a batch at once would delay every answer."""
        for group in accepted:
            self._facts[group.prefixes.seq] = batch_group(group)

    def withdraw_newest(self) -> None:
        """Take back the newest answers, which were not sent: no rank holds their batch."""
        if self._is_new:
            self._newest = None

    def _note_phase(self, answer: "Answer | Awaited | None", now_s: float) -> None:
        if isinstance(answer, Awaited):
            self._note_wait(now_s)
            return
        self._waits_from_s = None
        if answer is not None:
            self.phase = "training" if isinstance(answer[0], messages.Batch) else "ending"

    def _note_wait(self, now_s: float) -> None:
        self.phase = "waiting"
        self._waits_from_s = now_s if self._waits_from_s is None else self._waits_from_s

    def waits_s(self, now_s: float) -> float:
        """Return the seconds that rank 0 has waited for its batch, 0 while it does not wait."""
        return 0.0 if self._waits_from_s is None else now_s - self._waits_from_s

    def iteration_done(self, message: messages.IterationDone, now_s: float) -> None:
        """Record that every rank finished an iteration; ValueError if it had no batch."""
        ledger = self._dispatcher.ledger
        is_new = message.iteration == ledger.completed
        ledger.trained(message.iteration)
        if not is_new:
            return  # told twice
        self._dispatcher.note_event(f"iteration {message.iteration} was trained", now_s)
        self.phase = "publishing"
        # Before the first iteration workers load their models. A longer lead would not help.
        iteration_s = 0.0 if self._done_s is None else now_s - self._done_s
        admission = ledger.admission
        change = admission.finish_iteration(
            iteration_s, self._short_s, ledger.states(), message.relative_ess
        )
        self._done_s, self._short_s = now_s, 0.0
        if change == "tightened":
            log.warning(
                "old samples are worth %.2f of a fresh one, less than algorithm.min_ess: the lead is held to %.0f "
                "groups beyond a batch until they are worth more",
                message.relative_ess,
                admission.cap,
            )
        elif change == "restored":
            log.info("the lead is no longer held back: old samples are worth enough")

    def _answer(self, request: messages.GetBatch, now_s: float) -> Answer | Awaited | None:
        """Return a batch, the end of the run or a wait; None if the iteration is trained already."""
        ledger = self._dispatcher.ledger
        if request.iteration < ledger.completed:
            return None
        if request.iteration > ledger.completed:
            # This rank is ahead of rank 0's report, which is on its way.
            return Awaited("report", f"the report that iteration {request.iteration - 1} is done")
        if self._must_halt(request.iteration):
            return messages.Halt(request.iteration), []
        of, worded_s, text = self._worded
        is_worded = of == request.iteration and now_s - worded_s <= NOT_YET_EVERY_S
        if is_worded and not self._no_more and not ledger.may_form(request.iteration):
            return awaited_groups(ledger, text)
        choice = self._no_more or ledger.batch(request.iteration)
        if isinstance(choice, NotYetChosen):
            if not is_worded:
                # Naming looks at every task, so it happens only as often as a rank is told.
                text = groups_in_words(self._dispatcher, choice, now_s)
                self._worded = request.iteration, now_s, text
            return awaited_groups(ledger, text)
        if isinstance(choice, Starved):
            why = why_no_batch(ledger, self._config.filter, request.iteration, choice)
            choice = self._no_more = messages.CannotGoOn(why)
        if isinstance(choice, messages.CannotGoOn):
            return choice, []
        if choice is None:
            return messages.RunOver(ledger.completed, self.ending), []
        return self._batch(request, choice, now_s)

    def _must_halt(self, iteration: int) -> bool:
        # All ranks must leave the loop at one iteration, or a collective hangs. If one may hold a batch, all get it.
        # This broker may have given it to one, or an earlier broker did.
        is_ours = self._newest is not None and self._newest[0] == iteration
        may_be_held = is_ours or (
            iteration == self._resumed_at and iteration in self._dispatcher.ledger.batches
        )
        return self.is_halting and not self._no_more and not may_be_held

    def _batch(self, request: messages.GetBatch, choice: Choice, now_s: float) -> Answer:
        iteration = request.iteration
        if self._newest is None or self._newest[0] != iteration:
            results = self._dispatcher.ledger.results(choice.seqs)
            self._newest = iteration, self._describe(results, now_s), self._waited_s
            self._waited_s = {}
            self._is_new = True
        _, groups, waited_s = self._newest
        self.truncated_fraction = batch_fractions(groups)["truncated_fraction"]
        batch = messages.Batch(
            iteration=iteration,
            total_iterations=self.total_iterations,
            seed=derive(self._config.seed, "iteration", iteration),
            groups=groups,
            waited_s=waited_s,
        )
        return batch, []

    def fetched(self, request: messages.GetGroups | messages.GetEvaluation) -> Answer | None:
        """Return groups of an evaluation or of a batch; None if it is trained; ValueError for unknown groups."""
        if isinstance(request, messages.GetEvaluation):
            progress, groups = self._dispatcher.evaluations.progress(request.name)
            return msgspec.structs.replace(progress, is_halting=self.is_halting), list[Payload](
                groups
            )
        ledger, iteration = self._dispatcher.ledger, request.iteration
        # A late repetition: every rank has finished this iteration, and its groups are gone.
        if iteration < ledger.completed:
            return None
        seqs = ledger.batches.get(iteration)
        if seqs is None:
            raise ValueError(
                f"a rank asks for groups of iteration {iteration}, of which there is no batch"
            )
        if list(request.groups) != sorted(set(request.groups)) or request.groups[-1:] >= (
            len(seqs),
        ):
            raise ValueError(
                f"a rank asks for groups of iteration {iteration} by other than ascending indices below {len(seqs)}"
            )
        results = ledger.results([seqs[index] for index in request.groups])
        return messages.Groups(iteration, request.groups), [
            msgspec.msgpack.encode(each) for each in results
        ]

    def _describe(self, results: list[ScoredGroup], now_s: float) -> tuple[BatchGroup, ...]:
        stages = self._dispatcher.stages
        live = {group.seq for group in self._dispatcher.ledger.live()}
        groups = []
        for result in results:
            # After a restart the broker has only the results of the journal.
            facts = self._facts.pop(result.prefixes.seq, None) or batch_group(result)
            queued_s, waiting_s = stages.waits_s(result.prefixes.seq, now_s)
            times = StageTimes(result.sampled_s, queued_s, result.scoring_s, waiting_s)
            groups.append(msgspec.structs.replace(facts, stages=times))
        stages.forget_all_but(live)
        for seq in self._facts.keys() - live:
            del self._facts[seq]
        return tuple(groups)


def batch_group(result: ScoredGroup) -> BatchGroup:
    """Return what ranks learn about a group, without its waiting times."""
    prompt = len(result.prefixes.prompt_tokens) // TOKEN_BYTES
    # Ranks plan and train these rows alone: lengths, rewards and outcomes list them in this order.
    trainable = [
        (row, verdict) for row, verdict in result.judged_rows if verdict.status not in UNJUDGED
    ]
    rows, verdicts = [row for row, _ in trainable], [verdict for _, verdict in trainable]
    texts = result.texts
    # A row has several texts where its prefix is completed several times: counts of cut and cached
    # texts are over all of them.
    judged = [text for text in texts if text.status not in UNJUDGED]
    processes = [text.process for text in judged if text.process]
    scores = [score for each in processes for score in each.scores]
    statuses = [text.status for text in texts]
    part_names = dict.fromkeys(name for text in judged for name in text.parts)
    return BatchGroup(
        seq=result.prefixes.seq,
        prompt_id=result.prefixes.prompt.prompt_id,
        version=result.version,
        weights_digest=result.weights_digest,
        lengths=tuple([(prompt, len(row.tokens) // TOKEN_BYTES) for row in rows]),
        rewards=tuple([verdict.reward for verdict in verdicts]),
        outcomes=tuple([verdict.outcome for verdict in verdicts]) if processes else (),
        steps=len(scores),
        step_score_sum=math.fsum(scores),
        stages=StageTimes(result.sampled_s, 0.0, result.scoring_s, 0.0),
        completion_tokens=sum([verdict.completion_tokens for verdict in verdicts]),
        truncated=[text.finish for text in judged].count("length"),
        cached=[text.was_cached for text in judged].count(True),
        figure_sums=_figure_sums(Row, rows) | _figure_sums(Verdict, verdicts),
        texts=tuple([xxhash.xxh3_64_intdigest(row.tokens) >> 1 for row in rows]),
        statuses={each: statuses.count(each) for each in dict.fromkeys(statuses)},
        source=result.prefixes.prompt.source,
        parts={
            name: tuple([text.parts[name] for text in judged if name in text.parts])
            for name in part_names
        },
        row_parts={
            name: tuple([_part_of(verdict, name) for verdict in verdicts]) for name in part_names
        },
    )


def _part_of(verdict: Verdict, name: str) -> float:
    """Return the mean of a part over the judged texts of a row."""
    return fmean(
        [text.parts.get(name, 0.0) for text in verdict.texts if text.status not in UNJUDGED]
    )


def _figure_sums(kind: type[Row | Verdict], rows: Sequence[Row | Verdict]) -> dict[str, float]:
    """Return the sum of each field that is marked `RowFigure`, by figure."""
    return {
        figure: float(sum([getattr(row, name) for row in rows]))
        for name, figure in row_figures(kind).items()
    }
