"""The way of a completion to its verdict: at once, or as a question to a child. Pure."""

from dataclasses import dataclass

import msgspec

from prefixrl.common.config.foreign.verifier import SANDBOXED
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS, extract_answer
from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.programs import MAX_PROGRAM_CHARS
from prefixrl.scorer.verifier.child_process import FUNCTION_PIPE_BYTES
from prefixrl.scorer.verifier.exchange import STANDARD, AnswerFacts, ChildQuestion, Choices, frame
from prefixrl.scorer.verifier.rules.boxes import joined_answer
from prefixrl.scorer.verifier.rules.question import answer_beside_question
from prefixrl.scorer.verifier.rules.verify import Judgement, judge_exactly
from prefixrl.scorer.verifier.verifiers import CODE_RULE, find_verifier, is_mathematics

MAX_GOLD_CHARS = 8_192
"""Limit on a gold answer: a question must fit a pipe's buffer (64 KiB), or sending it could block."""
QUESTION_RULE = "question"
"""Rule of a verdict on an answer that repeats the question."""


@dataclass(frozen=True)
class ForChild:
    """A question that a child must judge."""

    question: ChildQuestion
    extracted: str
    """The answer as it will be reported, cut to MAX_ANSWER_CHARS."""


def ask_function(
    text: str, gold: str, question: str, facts: AnswerFacts, timeout_s: int
) -> Judgement | ForChild:
    """Route a completion to a user's reward function, which gets the whole text."""
    whole = ChildQuestion(gold, text, timeout_s, question, facts=facts)
    return _for_child(whole, extract_answer(text) or "")


def ask_verifier(
    text: str, gold: str, question: str, code: CodeMode, timeout_s: int, choices: Choices = STANDARD
) -> Judgement | ForChild:
    """Route a completion to the verifier that its row names, else to an exact verdict or to sympy."""
    if not is_mathematics(code):
        verifier = find_verifier(code)
        if verifier.find is None:
            whole = ChildQuestion(gold, text, timeout_s, question, code, choices)
            return _for_child(whole, extract_answer(text) or "")
        program = verifier.find(text)
        if program is not None and len(program) > MAX_PROGRAM_CHARS:
            return Judgement(0.0, "parse_fail", program[:MAX_ANSWER_CHARS], rule=CODE_RULE)
        if program is not None:
            # The sandbox sees no question, so that equal programs are judged once.
            seen_question = "" if code in SANDBOXED else question
            part = ChildQuestion(gold, program, timeout_s, seen_question, code, choices)
            return _for_child(part, program)
        if not verifier.falls_back:
            return Judgement(0.0, "no_answer", None)
    return _ask_rules(text, gold, question, timeout_s, choices)


def _ask_rules(
    text: str, gold: str, question: str, timeout_s: int, choices: Choices
) -> Judgement | ForChild:
    """Compare the answer of a text with the gold answer, or leave that to sympy."""
    extracted = joined_answer(text, gold) if choices.joins_boxes else extract_answer(text)
    if extracted is None:
        return Judgement(0.0, "no_answer", None)
    reported = extracted[:MAX_ANSWER_CHARS]
    answer = answer_beside_question(question, gold, extracted)
    if answer is None:
        return Judgement(0.0, "ok", reported, rule=QUESTION_RULE)
    verdict = judge_exactly(gold, answer)
    if verdict is not None:
        return msgspec.structs.replace(verdict, extracted=reported)
    if len(gold) > MAX_GOLD_CHARS:
        return _too_long(f"a gold answer of more than {MAX_GOLD_CHARS} characters")
    return ForChild(ChildQuestion(gold, answer, timeout_s), reported)


def _for_child(question: ChildQuestion, extracted: str) -> Judgement | ForChild:
    """Return the question, or an error if it is too long for the pipe of a child."""
    if len(frame(question)) > FUNCTION_PIPE_BYTES:
        return _too_long(
            f"more than {FUNCTION_PIPE_BYTES} bytes of question, answer and gold answer"
        )
    return ForChild(question, extracted[:MAX_ANSWER_CHARS])


def _too_long(reason: str) -> Judgement:
    return Judgement(0.0, "error", reason, "too long for a child")
