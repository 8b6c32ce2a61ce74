"""What learner ranks get for `GetBatch`: their shard, the names of what is missing, a halt, or the end of the run."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import msgspec

from prefixrl.common.config import RunConfig
from prefixrl.common.messages import (
    Batch,
    BatchGroup,
    CannotGoOn,
    FromBroker,
    GetBatch,
    Halt,
    NotYet,
    RunOver,
    ScoredGroup,
    StageTimes,
)
from prefixrl.common.packing import token_ids
from prefixrl.common.seeds import derive
from prefixrl.common.transport import Payload
from prefixrl.learner.broker.dispatch import Dispatcher
from prefixrl.learner.broker.filtering import Starved
from prefixrl.learner.broker.window import Choice, Wait
from prefixrl.learner.plan import plan_iteration, rows_of_rank
from prefixrl.learner.shares import truncated_fraction

NOT_YET_EVERY_S = 1.0
NAMED_GROUPS = 4

Answer = tuple[FromBroker, list[Payload]]


@dataclass(frozen=True)
class _NotYet:
    """What holds a batch up, in a word that is counted and in words for a person."""

    cause: Literal["rollouts", "scorers", "report"]
    text: str


class BatchDesk:
    """Ranks that wait for a batch. Each is answered within `NOT_YET_EVERY_S`, so that a dead broker is noticed."""

    def __init__(
        self, config: RunConfig, dispatcher: Dispatcher, problems: int, begun: int = -1
    ) -> None:
        """`begun`: the iteration that ranks may be at already, where an earlier broker died under them."""
        self._config = config
        self._dispatcher = dispatcher
        self._total_iterations = config.iterations_in_all(problems)
        self._waiting: dict[bytes, tuple[GetBatch, float]] = {}
        self._begun = begun
        self._looked_s = 0.0
        self._waited_s: dict[str, float] = {}
        self._newest: tuple[int, tuple[BatchGroup, ...], dict[str, float]] | None = None
        """The iteration handed out last, its groups and how long was waited for it: the same for every rank."""
        self._is_halting = False
        self.waiting_for = ""
        self._no_more: CannotGoOn | None = None
        """Said once, said to every rank: one that got a batch instead would wait for the others in a collective."""
        self.truncated_fraction = 0.0
        """Of the newest batch."""

    def ask(self, peer: bytes, request: GetBatch, now_s: float) -> None:
        """Note a rank's request; asking again replaces the earlier one."""
        self._waiting[peer] = (request, now_s)
        self._is_halting |= request.is_stopping

    def answers(self, now_s: float) -> dict[bytes, Answer]:
        """Everyone who can be answered now. The ledger's new records must be written down before these are sent."""
        answers: dict[bytes, Answer] = {}
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        waits: dict[str, float] = {}
        for peer, (request, since_s) in list(self._waiting.items()):
            answer = self._answer(request, now_s)
            if isinstance(answer, _NotYet):
                self.waiting_for = answer.text
                waits[answer.cause] = max(
                    waits.get(answer.cause, 0.0), min(passed_s, now_s - since_s)
                )
                if now_s - since_s > NOT_YET_EVERY_S:
                    answers[peer] = NotYet(request.iteration, self.waiting_for), []
                continue
            self.waiting_for = ""
            if answer is None:
                del self._waiting[peer]
            else:
                answers[peer] = answer
        for peer in answers:
            del self._waiting[peer]
        for cause, wait_s in waits.items():
            self._waited_s[cause] = self._waited_s.get(cause, 0.0) + wait_s
        return answers

    def _answer(self, request: GetBatch, now_s: float) -> Answer | _NotYet | None:
        """The shard or the end of the run; what it waits for; None for a question that is answered and trained already."""
        ledger = self._dispatcher.ledger
        if request.iteration < ledger.completed:
            return None
        if request.iteration > ledger.completed:
            # A rank that is ahead of rank 0's report: one message away, no fault.
            return _NotYet("report", f"the report that iteration {request.iteration - 1} is done")
        # Ranks leave the loop at the same iteration or a collective would hang: where one may hold its shard, all get theirs.
        if self._is_halting and not self._no_more and not self._may_be_held(request.iteration):
            return Halt(request.iteration), []
        choice = self._no_more or ledger.batch(request.iteration)
        if isinstance(choice, Wait):
            return self._name(choice, now_s)
        if isinstance(choice, Starved):
            choice = self._no_more = CannotGoOn(self._too_few(request.iteration, choice))
        if isinstance(choice, CannotGoOn):
            return choice, []
        if choice is None:
            return RunOver(ledger.completed), []
        return self._shard(request, choice, now_s)

    def _may_be_held(self, iteration: int) -> bool:
        """Whether a rank may have its shard of this iteration, from this broker or from one that died under the same ranks."""
        is_ours = self._newest is not None and self._newest[0] == iteration
        return is_ours or (
            iteration == self._begun and iteration in self._dispatcher.ledger.batches
        )

    def _shard(self, request: GetBatch, choice: Choice, now_s: float) -> Answer:
        results = self._dispatcher.ledger.results(choice.seqs)
        if self._newest is None or self._newest[0] != request.iteration:
            self._newest = request.iteration, self._describe(results, now_s), self._waited_s
            self._waited_s = {}
        _, groups, waited_s = self._newest
        self.truncated_fraction = truncated_fraction(groups)
        mine = self._groups_of_rank(groups, request)
        encode = msgspec.msgpack.Encoder().encode
        seed = derive(self._config.seed, "iteration", request.iteration)
        batch = Batch(
            request.iteration, self._total_iterations, seed, groups, tuple(mine), waited_s
        )
        return batch, [encode(results[index]) for index in mine]

    def _describe(self, results: list[ScoredGroup], now_s: float) -> tuple[BatchGroup, ...]:
        stages = self._dispatcher.stages
        groups = tuple(
            _batch_group(each, *stages.waits_s(each.prefixes.seq, now_s)) for each in results
        )
        stages.forget_all_but({group.seq for group in self._dispatcher.ledger.live()})
        return groups

    def _groups_of_rank(self, groups: tuple[BatchGroup, ...], request: GetBatch) -> list[int]:
        """Indices of the groups of which a rank trains at least one row, by the same plan the rank makes."""
        lengths = [length for group in groups for length in group.lengths]
        owner = [index for index, group in enumerate(groups) for _ in group.lengths]
        seed = derive(self._config.seed, "iteration", request.iteration)
        minibatches = plan_iteration(
            lengths,
            seed,
            request.ranks,
            self._config.algorithm.minibatches,
            self._config.learner.micro_batch_tokens,
        )
        rows = rows_of_rank(minibatches, request.rank)
        return sorted({owner[row] for row in rows})

    def _too_few(self, iteration: int, starved: Starved) -> str:
        ledger = self._dispatcher.ledger
        causes = ", ".join(f"{count} {cause}" for cause, count in ledger.counts.causes.items())
        newest = f"; the newest error: {ledger.newest_error}" if ledger.newest_error else ""
        ended = f"ended so far: {causes or 'nothing'}{newest}"
        if starved.why == "failures":
            return (
                f"iteration {iteration} gets no batch: {ledger.failures.share:.0%} of the rows of the last "
                f"{ledger.failures.groups} groups could not be sampled or judged, more than broker.max_failure_share = "
                f"{ledger.failures.most:g} ({ended}); mend what fails, or raise the limit"
            )
        return f"iteration {iteration} gets no batch: {self._nothing_passed(starved)} ({ended})"

    def _nothing_passed(self, starved: Starved) -> str:
        limits, rate = self._config.filter, self._dispatcher.ledger.pass_rate
        if rate is None or limits.accuracy is None:
            return "all problems are used up and none could be sampled and judged"
        low, high = limits.accuracy
        share = f"{rate.passed} of the last {rate.judged} judged groups passed filter.accuracy = [{low:g}, {high:g}]"
        remedy = "widen the band, raise algorithm.samples_per_prompt, or train on other problems"
        if starved.why == "data":
            return f"all problems are used up and {share}; {remedy}"
        lower = ", lower filter.min_pass_rate" if rate.passed else ""
        return (
            f"{share}, fewer than filter.min_pass_rate = {limits.min_pass_rate:g} of them or none; {remedy}, or move the "
            f"limit (raise filter.limit_batches{lower})"
        )

    def _name(self, wait: Wait, now_s: float) -> _NotYet:
        states = self._dispatcher.ledger.states()
        sampled = sum(states.get(state, 0) for state in ("sampled", "scoring", "scored"))
        return _NotYet(
            "scorers" if sampled >= self._config.algorithm.groups_per_iteration else "rollouts",
            f"{self._groups_waited_for(wait, now_s)}{self._pass_rate()}",
        )

    def _pass_rate(self) -> str:
        rate = self._dispatcher.ledger.pass_rate
        if rate is None or not rate.judged:
            return ""
        return f"; {rate.passed} of the last {rate.judged} judged groups passed the filter"

    def _groups_waited_for(self, wait: Wait, now_s: float) -> str:
        registry = self._dispatcher.registry
        if not wait.for_seqs:
            rollouts = [
                f"{each.name} ({each.phase}, version {each.version})"
                for each in registry.of("rollout")
            ]
            return f"prefixes from {', '.join(rollouts) or 'any rollout: none is connected'}"
        holders = {
            seq: f"{worker.name} on {worker.host} for {now_s - lease.since_s:.0f} s"
            for worker in registry.by_identity.values()
            for lease in worker.leases.values()
            if lease.kind == "train"
            for seq in lease.item.seqs
        }
        states = {group.seq: group.state for group in self._dispatcher.ledger.live()}
        named = [
            f"{seq} ({states.get(seq, 'ended')}, {holders.get(seq, 'queued')})"
            for seq in wait.for_seqs[:NAMED_GROUPS]
        ]
        more = len(wait.for_seqs) - NAMED_GROUPS
        return f"groups {', '.join(named)}{f' and {more} more' if more > 0 else ''}"


def _batch_group(result: ScoredGroup, queued_s: float, waiting_s: float) -> BatchGroup:
    prompt = len(token_ids(result.prefixes.prompt_tokens))
    trainable = [
        (row, verdict)
        for row, verdict in zip(result.prefixes.rows, result.verdicts, strict=True)
        if verdict.is_judged
    ]
    judged = [text for text in result.texts if text.is_judged]
    return BatchGroup(
        seq=result.prefixes.seq,
        prompt_id=result.prefixes.prompt.prompt_id,
        version=result.version,
        weights_digest=result.weights_digest,
        lengths=tuple((prompt, len(token_ids(row.tokens))) for row, _ in trainable),
        rewards=tuple(verdict.reward for _, verdict in trainable),
        stages=StageTimes(result.sampled_s, queued_s, result.scoring_s, waiting_s),
        completion_tokens=sum(verdict.completion_tokens for _, verdict in trainable),
        truncated=sum(text.finish == "length" for text in judged),
        cached=sum(text.was_cached for text in judged),
        as_text=sum(verdict.was_text for _, verdict in trainable),
        statuses=dict(Counter(text.status for text in result.texts)),
    )
