"""`python -m prefixrl.learner.generation`: answers given problems; `prefixrl generate` starts it and the workers.

    plan.json ──▶ rows, gold answers or not ──▶ blocks ──▶ evaluations by the broker ──▶ answers.jsonl, in their order

So many blocks are under way at once, and no more are held: what is answered is written as soon as all before it is, and the
broker forgets it. A block is what an evaluation samples in one forward, so that both get the same texts.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from prefixrl.common.config import RunConfig, from_json, import_functions
from prefixrl.common.errors import PeerLost
from prefixrl.common.messages import Evaluate, Row, ScoredGroup, Verdict
from prefixrl.common.offline import ANSWERS_FILE, PLAN_FILE, Answer, GenerationPlan, check_weights
from prefixrl.common.packing import token_ids
from prefixrl.common.process import exit_codes, start_logging
from prefixrl.learner import problems
from prefixrl.learner.broker.evaluations import ROWS_PER_ITEM
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.data.lengths import too_long
from prefixrl.learner.data.rows import layout
from prefixrl.learner.evaluate import texts_of
from prefixrl.learner.evaluations import POLL_S, Question, request_of
from prefixrl.learner.offline import serving
from prefixrl.learner.problems import Problem
from prefixrl.learner.rundir import RunDirectory

log = logging.getLogger(__name__)

BLOCKS_PER_WORKER = 4
"""Under way at once: enough for workers that hold several tasks."""


@dataclass
class GivenRow:
    """A row of the input."""

    answer: Answer
    """Its line as far as it is known before it is asked."""
    problem: Problem | None
    """With a number of this input for an id: those of the rows may be anything. None where the row is bad."""


@dataclass
class Block:
    """Rows that are asked together, and the bad ones among them."""

    rows: Sequence[GivenRow]
    request: Evaluate | None
    """None where all are bad."""
    groups: dict[str, ScoredGroup] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    is_done: bool = False


def given_rows(config: RunConfig) -> list[GivenRow]:
    """Every row of the held-out sources in its order; bad ones, and those no prompt has room for, with their reason."""
    found: list[GivenRow] = []
    sources = config.data.eval
    for source, label in zip(sources, problems.labels(sources), strict=True):
        report = problems.SourceReport(label, source.path or "")
        named = layout(source, config.data).columns
        for row in problems.rows_of(source, config.data, report, needs_all=False):
            others = {name: value for name, value in row.values.items() if name not in named}
            found.append(_given(row, others, number=len(found)))
        log.info(
            "%s: %d rows, %d left out by where and without", label, report.rows, report.left_out
        )
    usable = [row.problem for row in found if row.problem is not None]
    for number, reason in too_long(usable, config).items():
        known = found[int(number)].answer
        answer = msgspec.structs.replace(known, status="bad_row", reason=reason)
        found[int(number)] = GivenRow(answer, None)
    return found


def _given(row: problems.ReadRow, others: dict[str, object], number: int) -> GivenRow:
    place, problem = row.place, row.problem
    if problem is None:
        bad = Answer(
            place.source, place.file, place.row, "", "", None, "", "bad_row", place.reason,
            columns=dict(row.values),
        )  # fmt: skip
        return GivenRow(bad, None)
    answer = Answer(
        place.source, place.file, place.row, problem.prompt_id, problem.question,
        problem.gold or None, problem.family, "failed", columns=others,
    )  # fmt: skip
    return GivenRow(answer, msgspec.structs.replace(problem, prompt_id=str(number)))


class Generation:
    """One plan, being carried out."""

    def __init__(
        self, plan: GenerationPlan, config: RunConfig, rows: Sequence[GivenRow], out: BinaryIO
    ) -> None:
        self._plan = plan
        self._config = config
        self._out = out
        self._texts = texts_of(config)
        self._waiting = self._blocks(rows)
        self._open: deque[Block] = deque()

    def _blocks(self, rows: Sequence[GivenRow]) -> Iterator[Block]:
        """As many problems each as an evaluation samples at once, bad rows between them not counted."""
        taken: list[GivenRow] = []
        asked: list[Problem] = []
        for row in rows:
            taken.append(row)
            if row.problem is not None:
                asked.append(row.problem)
            if len(asked) == ROWS_PER_ITEM:
                yield self._block(taken, asked)
                taken, asked = [], []
        if taken:
            yield self._block(taken, asked)

    def _block(self, rows: list[GivenRow], asked: list[Problem]) -> Block:
        if not asked:
            return Block(rows, None, is_done=True)
        name = f"rows-{asked[0].prompt_id}"
        plan = self._plan
        question = Question(name, 0, asked, plan.decoding, samples=plan.samples)
        return Block(rows, request_of(question, self._config, self._texts))

    def run(self, client: BrokerClient, watch: Callable[[], None]) -> None:
        """Answer everything.

        Raises:
            PeerLost: nothing was answered for `evaluation.timeout_s`, naming the rows that are waited for.
        """
        workers = self._config.launch.rollouts + self._config.launch.scorers
        progressed_s = time.monotonic()
        while self._fill(client, BLOCKS_PER_WORKER * workers):
            watch()
            try:
                if sum([self._gather(client, block) for block in self._open]):
                    progressed_s = time.monotonic()
            except PeerLost as error:
                log.warning("%s", error)
            self.write()
            if time.monotonic() - progressed_s > self._config.evaluation.timeout_s:
                raise PeerLost(self._overdue())
            time.sleep(POLL_S)

    def write_unasked(self) -> None:
        """Write rows of which none can be asked."""
        self._open.extend(self._waiting)
        self.write()

    def write(self) -> None:
        """Write what is answered, up to the first block that is not."""
        while self._open and self._open[0].is_done:
            block = self._open.popleft()
            lines = [line for row in block.rows for line in self._lines(block, row)]
            self._out.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._out.flush()

    def _fill(self, client: BrokerClient, most: int) -> bool:
        """Ask for more while there is room; whether anything is open."""
        while len(self._open) < most and (block := next(self._waiting, None)) is not None:
            self._open.append(block)
            if block.request is not None:
                client.evaluate(block.request)
        return bool(self._open)

    def _gather(self, client: BrokerClient, block: Block) -> bool:
        """Take a block that is finished; ask again for one that a restarted broker has forgotten."""
        if block.is_done or block.request is None:
            return False
        progress, groups = client.evaluation(block.request.name)
        if progress.total < 0:
            client.evaluate(block.request)
        if progress.total < 0 or progress.done + progress.failed < progress.total:
            return False
        for group in groups:
            check_weights(self._plan.version, group.weights_digest, self._plan.published)
        block.groups = {group.prefixes.prompt.prompt_id: group for group in groups}
        prompts = block.request.prompts
        block.causes = {prompts[at].prompt_id: cause for at, cause in progress.causes}
        block.is_done = True
        client.forget(block.request.name)
        return True

    def _overdue(self) -> str:
        block = next(block for block in self._open if not block.is_done)
        first, last = block.rows[0].answer, block.rows[-1].answer
        return (
            f"no answer within {self._config.evaluation.timeout_s:g} s (evaluation.timeout_s); waiting for "
            f"{first.file} row {first.row} to {last.file} row {last.row}; see the logs of rollouts and scorers"
        )

    # --- lines -------------------------------------------------------------------------------------------------------

    def _lines(self, block: Block, row: GivenRow) -> Iterator[Answer]:
        if row.problem is None:
            yield row.answer
            return
        number = row.problem.prompt_id
        group = block.groups.get(number)
        if group is None:
            cause = block.causes.get(number, "it was lost on the way")
            yield msgspec.structs.replace(row.answer, reason=cause)
            return
        judged = zip(group.prefixes.rows, group.verdicts, strict=True)
        for sample, (written, verdict) in enumerate(judged):
            line = self._line(row.answer, written, verdict)
            digest, version = group.weights_digest, self._plan.version
            yield msgspec.structs.replace(
                line, sample=sample, version=version, weights_digest=digest
            )

    def _line(self, given: Answer, row: Row, verdict: Verdict) -> Answer:
        # In direct mode the adapter wrote the completion itself.
        is_direct, tokens = self._config.mode == "direct", token_ids(row.tokens)
        is_error = verdict.status == "error"
        return msgspec.structs.replace(
            given,
            status=verdict.status,
            reason=verdict.extracted if is_error else "",
            prefix="" if is_direct else self._texts.text(tokens),
            completion=verdict.completion,
            extracted=None if is_error else verdict.extracted or None,
            reward=verdict.reward if verdict.is_judged else None,
            finish=verdict.finish,
            prefix_tokens=0 if is_direct else int(tokens.size),
            completion_tokens=int(tokens.size) if is_direct else verdict.completion_tokens,
        )


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def main(directory: Path) -> None:
    """Carry out the plan in DIRECTORY."""
    start_logging("prefixrl-generation")
    with exit_codes():
        plan = msgspec.json.decode((directory / PLAN_FILE).read_bytes(), type=GenerationPlan)
        config = from_json(plan.config, f"the plan in {directory}")
        import_functions(config)
        rows = given_rows(config)
        owned = RunDirectory(config)
        problems.keep_none(owned.path)
        # A file of which nothing was read yet: this process is not started again in the middle of its answers.
        with (directory / ANSWERS_FILE).open("xb") as out:
            generation = Generation(plan, config, rows, out)
            if any(row.problem for row in rows):
                with serving(config) as (client, watch):
                    generation.run(client, watch)
            else:
                generation.write_unasked()


if __name__ == "__main__":
    main()
