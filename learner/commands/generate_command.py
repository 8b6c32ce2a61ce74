"""The answers of `prefixrl generate`: rows ──▶ blocks ──▶ evaluations ──▶ answers.jsonl, in their order.

Few blocks are open at once: an answered one is written as soon as all before it are, and the broker forgets it. A block
holds as many problems as an evaluation samples together, so that with `bitwise` both get the same texts.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.evaluation.plans import AnswerLine, OfflinePlan
from prefixrl.common.prompts.rendering import texts_of
from prefixrl.common.wire.messages.fields import common_fields
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.broker.groups.evaluations import ROWS_PER_ITEM
from prefixrl.learner.data import problems
from prefixrl.learner.data.lengths import unaskable
from prefixrl.learner.data.problems import Problem
from prefixrl.learner.evaluation.requests import (
    POLL_S,
    Answers,
    EvaluationRequest,
    OpenRequests,
    judged,
)
from prefixrl.learner.run.stop import StopSignal

log = logging.getLogger(__name__)

BLOCKS_PER_WORKER = 4
"""Blocks that are open at once per worker: enough for workers that hold several tasks."""


@dataclass(frozen=True)
class GivenRow:
    """A row of the input."""

    answer: AnswerLine
    """Its line of the output, as far as it is known before the problem is asked."""
    problem: Problem | None
    """Its prompt id is the row's index, since ids of the input may repeat. None where the row is bad."""


@dataclass
class Block:
    """Rows that are asked together, and the bad rows among them."""

    rows: Sequence[GivenRow]
    request: Evaluate | None
    """None where all rows are bad."""
    answers: Answers | None = None

    @property
    def is_done(self) -> bool:
        """True if its lines can be written."""
        return self.request is None or self.answers is not None


def given_rows(config: RunConfig) -> list[GivenRow]:
    """Return every row of the held-out sources in order; bad rows with their reason."""
    rows: list[GivenRow] = []
    sources = config.data.eval
    for source, label in zip(sources, problems.labels(sources), strict=True):
        report = problems.SourceReport(label, source.path or "")
        for row in problems.rows_of(source, config.data, report, needs_all=False):
            problem_columns = report.layout.columns if report.layout else ()
            other_columns = {
                name: value for name, value in row.values.items() if name not in problem_columns
            }
            rows.append(_given(row, other_columns, number=len(rows)))
        log.info(
            "%s: %d rows, %d left out by where and without", label, report.rows, report.left_out
        )
    usable = [row.problem for row in rows if row.problem]
    for number, reason in unaskable(usable, config).items():
        answer = rows[int(number)].answer
        answer = msgspec.structs.replace(answer, status="bad_row", reason=reason)
        rows[int(number)] = GivenRow(answer, None)
    return rows


def _given(row: problems.ReadRow, other_columns: dict[str, object], number: int) -> GivenRow:
    problem = row.problem
    origin = msgspec.structs.asdict(row.origin)
    if problem is None:
        return GivenRow(AnswerLine(**origin, status="bad_row", columns=dict(row.values)), None)
    answer = AnswerLine(
        **origin,
        id=problem.prompt_id,
        question=problem.question,
        gold=problem.gold or None,
        family=problem.family,
        status="failed",
        columns=other_columns,
    )
    return GivenRow(answer, msgspec.structs.replace(problem, prompt_id=str(number)))


class AnswerGeneration:
    """Answers the rows of one plan and writes a line per answer."""

    def __init__(
        self, plan: OfflinePlan, config: RunConfig, rows: Sequence[GivenRow], out: BinaryIO
    ) -> None:
        self._plan = plan
        self._config = config
        self._out = out
        self._texts = texts_of(config, "rollout")
        self._waiting = self._blocks(rows)
        self._open: deque[Block] = deque()

    def _blocks(self, rows: Sequence[GivenRow]) -> Iterator[Block]:
        """Yield blocks of as many problems as an evaluation samples at once, with the bad rows."""
        block_rows: list[GivenRow] = []
        block_problems: list[Problem] = []
        for number, row in enumerate(rows, start=1):
            block_rows.append(row)
            if row.problem:
                block_problems.append(row.problem)
            if len(block_problems) == ROWS_PER_ITEM or number == len(rows):
                plan = self._plan
                question = EvaluationRequest(
                    f"rows-{number}", 0, block_problems, plan.decoding, samples=plan.samples
                )
                message = question.message(self._config, self._texts)
                yield Block(block_rows, message if block_problems else None)
                block_rows = []
                block_problems = []

    def run(self, client: BrokerClient, stop: StopSignal) -> None:
        """Answer everything; raise PeerLost if nothing is answered for `evaluation.timeout_s`."""
        requests = OpenRequests(client, 0)
        workers = self._config.launch.rollouts + self._config.launch.scorers
        progressed_s = time.monotonic()
        while self._fill(requests, BLOCKS_PER_WORKER * workers):
            stop.check_servers()
            try:
                for answers in requests.gather():
                    self._take_answers(answers)
                    client.forget(answers.request.name)
                    progressed_s = time.monotonic()
            # Servers that die are restarted and asked again: `evaluation.timeout_s` ends it.
            except PeerLost as error:
                log.warning("%s", error)
            self.write()
            if time.monotonic() - progressed_s > self._config.evaluation.timeout_s:
                waiting = next(block.rows for block in self._open if not block.is_done)
                first = waiting[0].answer
                last = waiting[-1].answer
                raise PeerLost(
                    f"no answer within {self._config.evaluation.timeout_s:g} s (evaluation.timeout_s); waiting for "
                    f"{first.file} row {first.row} to {last.file} row {last.row}; see the logs of rollouts and scorers"
                )
            time.sleep(POLL_S)

    def write_unasked(self) -> None:
        """Write rows that are all bad."""
        self._open.extend(self._waiting)
        self.write()

    def write(self) -> None:
        """Write the answered blocks, up to the first one that is not."""
        while self._open and self._open[0].is_done:
            block = self._open.popleft()
            lines = (line for row in block.rows for line in self._lines(block, row))
            self._out.write(msgspec.json.Encoder().encode_lines(lines))
            self._out.flush()

    def _fill(self, requests: OpenRequests, most: int) -> bool:
        """Ask for more while there is room; return True while any block is open."""
        while len(self._open) < most and (block := next(self._waiting, None)) is not None:
            self._open.append(block)
            if block.request is not None:
                requests.send_request(block.request)
        return bool(self._open)

    def _take_answers(self, answers: Answers) -> None:
        """Note answers; raise DataError if rollouts hold other weights than the run published."""
        for group in answers.groups.values():
            self._plan.check_weights(group.weights_digest)
        next(block for block in self._open if block.request is answers.request).answers = answers

    def _lines(self, block: Block, row: GivenRow) -> Iterator[AnswerLine]:
        if row.problem is None or block.answers is None:
            yield row.answer
            return
        number = row.problem.prompt_id
        is_direct = self._config.mode == "direct"
        group = block.answers.groups.get(number)
        if group is None:
            silence = "the broker returned neither an answer nor a cause"
            cause = block.answers.causes.get(number, silence)
            yield msgspec.structs.replace(row.answer, reason=cause)
            return
        rows = judged(group, self._config, self._texts, self._plan.version, {})
        for judged_row, prefix, verdict in zip(
            rows, group.prefixes.rows, group.verdicts, strict=True
        ):
            is_error = judged_row.status == "error"
            tokens = int(token_ids(prefix.tokens).size)
            fields = common_fields(AnswerLine, judged_row) | {
                "status": verdict.status,
                "reason": judged_row.extracted if is_error else "",
                "extracted": None if is_error else judged_row.extracted or None,
                "reward": judged_row.reward if verdict.is_judged else None,
                "family": row.answer.family,
                # In direct mode the adapter writes the answer itself: there is no prefix.
                "prefix_tokens": 0 if is_direct else tokens,
                "completion_tokens": tokens if is_direct else verdict.completion_tokens,
            }
            yield msgspec.structs.replace(row.answer, **fields)
