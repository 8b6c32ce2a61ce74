"""The way of a completion to its verdict: at once, or as a question to a child. Pure."""

from dataclasses import dataclass

import msgspec

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS, extract_answer
from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.programs import MAX_PROGRAM_CHARS, find_program
from prefixrl.scorer.verifier.child_process import FUNCTION_PIPE_BYTES
from prefixrl.scorer.verifier.exchange import STANDARD, ChildQuestion, Choices, frame
from prefixrl.scorer.verifier.rules.boxes import joined_answer
from prefixrl.scorer.verifier.rules.question import answer_beside_question
from prefixrl.scorer.verifier.rules.verify import Judgement, judge_exactly

MAX_GOLD_CHARS = 8_192
"""Limit on a gold answer: a question must fit a pipe's buffer (64 KiB), or sending it could block."""


@dataclass(frozen=True)
class ForChild:
    """A question that a child must judge."""

    question: ChildQuestion
    extracted: str
    """The answer as it will be reported, cut to MAX_ANSWER_CHARS."""


def ask_function(
    text: str, gold: str, question: str, _code: CodeMode, timeout_s: int
) -> Judgement | ForChild:
    """Route a completion to a user's reward function, which gets the whole text."""
    return _fitting(ChildQuestion(gold, text, timeout_s, question), extract_answer(text) or "")


def ask_verifier(
    text: str, gold: str, question: str, code: CodeMode, timeout_s: int, choices: Choices = STANDARD
) -> Judgement | ForChild:
    """Route a completion to an exact verdict, to sympy, or to the sandbox if it holds a program."""
    program = find_program(text, code) if code != "none" else None
    if program is not None and len(program) > MAX_PROGRAM_CHARS:
        return Judgement(0.0, "parse_fail", program[:MAX_ANSWER_CHARS])
    if program is not None:
        return _fitting(
            ChildQuestion(gold, program, timeout_s, code=code, choices=choices), program
        )
    if code == "tests":
        return Judgement(0.0, "no_answer", None)
    extracted = joined_answer(text, gold) if choices.joins_boxes else extract_answer(text)
    if extracted is None:
        return Judgement(0.0, "no_answer", None)
    shown = extracted[:MAX_ANSWER_CHARS]
    answer = answer_beside_question(question, gold, extracted)
    if answer is None:
        return Judgement(0.0, "ok", shown)
    if (verdict := judge_exactly(gold, answer)) is not None:
        return msgspec.structs.replace(verdict, extracted=shown)
    if len(gold) > MAX_GOLD_CHARS:
        return _too_long(f"a gold answer of more than {MAX_GOLD_CHARS} characters")
    return ForChild(ChildQuestion(gold, answer, timeout_s), shown)


def _fitting(question: ChildQuestion, extracted: str) -> Judgement | ForChild:
    if len(frame(question)) > FUNCTION_PIPE_BYTES:
        return _too_long(
            f"more than {FUNCTION_PIPE_BYTES} bytes of question, answer and gold answer"
        )
    return ForChild(question, extracted[:MAX_ANSWER_CHARS])


def _too_long(reason: str) -> Judgement:
    return Judgement(0.0, "error", reason, "too long for a child")
