"""What learner ranks get for `GetBatch`: their shard, the names of what is missing, or the end of the run."""

import msgspec

from prefixrl.common.config import RunConfig
from prefixrl.common.messages import (
    Batch,
    BatchGroup,
    FromBroker,
    GetBatch,
    NotYet,
    RunOver,
    ScoredGroup,
)
from prefixrl.common.packing import token_ids
from prefixrl.common.seeds import derive
from prefixrl.common.transport import Payload
from prefixrl.learner.broker.dispatch import Dispatcher
from prefixrl.learner.broker.window import Choice, Wait
from prefixrl.learner.plan import plan_iteration, rows_of_rank

NOT_YET_EVERY_S = 1.0
NAMED_GROUPS = 4

Answer = tuple[FromBroker, list[Payload]]


class BatchDesk:
    """Ranks that wait for a batch. Each is answered within `NOT_YET_EVERY_S`, so that a dead broker is noticed."""

    def __init__(self, config: RunConfig, dispatcher: Dispatcher, problems: int) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._total_iterations = config.iterations_in_all(problems)
        self._waiting: dict[bytes, tuple[GetBatch, float]] = {}
        self.waiting_for = ""

    def ask(self, peer: bytes, request: GetBatch, now_s: float) -> None:
        """Note a rank's request; asking again replaces the earlier one."""
        self._waiting[peer] = (request, now_s)

    def answers(self, now_s: float) -> dict[bytes, Answer]:
        """Everyone who can be answered now. The ledger's new records must be written down before these are sent."""
        answers: dict[bytes, Answer] = {}
        for peer, (request, since_s) in list(self._waiting.items()):
            answer = self._answer(request, now_s)
            if isinstance(answer, str):
                self.waiting_for = answer
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
        return answers

    def _answer(self, request: GetBatch, now_s: float) -> Answer | str | None:
        """The shard or the end of the run; what it waits for; None for a question that is answered and trained already."""
        ledger = self._dispatcher.ledger
        if request.iteration < ledger.completed:
            return None
        if request.iteration > ledger.completed:
            # A rank that is ahead of rank 0's report: one message away, no fault.
            return f"the report that iteration {request.iteration - 1} is done"
        choice = ledger.batch(request.iteration)
        if isinstance(choice, Wait):
            return self._name(choice, now_s)
        if choice is None:
            return RunOver(ledger.completed), []
        return self._shard(request, choice)

    def _shard(self, request: GetBatch, choice: Choice) -> Answer:
        results = self._dispatcher.ledger.results(choice.seqs)
        groups = tuple(_batch_group(result) for result in results)
        mine = self._groups_of_rank(groups, request)
        encode = msgspec.msgpack.Encoder().encode
        seed = derive(self._config.seed, "iteration", request.iteration)
        batch = Batch(request.iteration, self._total_iterations, seed, groups, tuple(mine))
        return batch, [encode(results[index]) for index in mine]

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

    def _name(self, wait: Wait, now_s: float) -> str:
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


def _batch_group(result: ScoredGroup) -> BatchGroup:
    prompt = len(token_ids(result.prefixes.prompt_tokens))
    trainable = [
        (row, verdict)
        for row, verdict in zip(result.prefixes.rows, result.verdicts, strict=True)
        if verdict.status != "error"
    ]
    return BatchGroup(
        seq=result.prefixes.seq,
        prompt_id=result.prefixes.prompt.prompt_id,
        version=result.version,
        weights_digest=result.weights_digest,
        lengths=tuple((prompt, len(token_ids(row.tokens))) for row, _ in trainable),
        rewards=tuple(verdict.reward for _, verdict in trainable),
    )
