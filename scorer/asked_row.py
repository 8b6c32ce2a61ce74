"""A row as the target is asked: its prompt, and the beginning of its answer if it continues a prefix.

placement = "answer":   prompt of the question                  prefix, continued
placement = "advice":   prompt of the question with the prefix  nothing: the target answers from the beginning

With `scorer.stop_when_answered` the row's watch reads what the target writes, and ends it where its answer is complete.
"""

from dataclasses import dataclass

import numpy as np

from prefixrl.common.engines.interface.base import TokenIds, Watch
from prefixrl.common.prompts.answer_end import AnswerWatch, open_thought
from prefixrl.common.prompts.extract import extract_answer
from prefixrl.common.prompts.rendering import Texts, continued_prefix
from prefixrl.common.wire.messages.groups import GroupPrefixes, Row, TextVerdict
from prefixrl.common.wire.packing import token_ids
from prefixrl.scorer.leak import holds_gold

NO_TOKENS: TokenIds = np.zeros(0, dtype=np.int32)
LEAK_RULE = "leak"
"""Rule of a verdict on a prefix that holds the gold answer."""
LEAKED = TextVerdict(
    reward=0.0,
    status="ok",
    extracted="",
    finish="eos",
    completion_tokens=0,
    elapsed_ms=0,
    rule=LEAK_RULE,
    is_leak=True,
)
"""Verdict with `reward.no_leak`: nothing is asked of the target."""


@dataclass(frozen=True)
class AskedRow:
    """One row as the target reads it."""

    prompt: TokenIds
    prefix: TokenIds
    """The beginning of the answer; empty where the prefix is advice in the prompt."""
    text: str
    """The prefix as text, or the advice."""
    was_text: bool
    """True if the prefix was encoded from its text because the tokenizers are of two families."""
    is_answered: bool
    """True if the prefix alone has an answer in a box already."""
    is_leak: bool
    """True if the gold answer stands in the prefix."""


class GroupAsking:
    """The rows of one group; equal prompts are rendered once."""

    def __init__(self, target: Texts, group: GroupPrefixes, has_advice: bool) -> None:
        self._target = target
        self._group = group
        self._has_advice = has_advice
        self._prompts: dict[str, TokenIds] = {}
        """By the advice in them, "" without advice."""

    def row(self, row: Row) -> AskedRow:
        """Return a row as it is asked; raises ValueError if it cannot be rendered."""
        prefix, was_text, advice = NO_TOKENS, False, ""
        if self._has_advice:
            advice = text = row.text or ""
        else:
            prefix, was_text = continued_prefix(self._target, token_ids(row.tokens), row.text)
            text = self._target.text(prefix)
        problem = self._group.prompt
        return AskedRow(
            prompt=self._prompt(advice),
            prefix=prefix,
            text=text,
            was_text=was_text,
            is_answered=extract_answer(text) is not None,
            is_leak=problem.code != "tests" and holds_gold(text, problem.gold),
        )

    def _prompt(self, advice: str) -> TokenIds:
        if advice not in self._prompts:
            problem = self._group.prompt
            self._prompts[advice] = self._target.prompt(
                problem.question, problem.system, problem.earlier, advice
            )
        return self._prompts[advice]


def watch_of(texts: Texts, prompt: TokenIds, prefix: TokenIds, answer: TokenIds) -> Watch:
    """Return the watch of a row of `prompt` and `answer`, of which another model has written the `prefix`."""
    read_piece = texts.piece_reader()
    pieces = [read_piece(token) for token in answer.tolist()]
    beginning = "".join(pieces[: prefix.size])
    watch = AnswerWatch(open_thought(texts.decode_with_special(prompt)) + beginning)
    # A text that is extended goes on behind what the target wrote before its limit.
    for piece in pieces[prefix.size :]:
        watch.add_piece(piece)
    return lambda token: watch.add_piece(read_piece(token))
