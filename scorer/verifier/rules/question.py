"""An answer beside the question, whose formulas are no answers. Pure."""

import functools
import re

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.scorer.verifier.rules.guards import split_outside_brackets
from prefixrl.scorer.verifier.rules.looks import (
    FORMULA_SPELLINGS,
    apply_rewrites,
    normal_form,
    tidy_text,
)
from prefixrl.scorer.verifier.rules.units import without_unit
from prefixrl.scorer.verifier.rules.words import choice_of, is_choice, words_of

_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\a-zA-Z{])[^\W\d_]{3,}(?![a-zA-Z}])|[?!:;](?=\s)")
_LONE_VALUE = re.compile(r"[-+]?[\d.,~]*|\\?[a-zA-Z]|")
"""A number or a letter alone is an answer, though the question has it."""


def answer_beside_question(question: str, gold: str, answer: str) -> str | None:
    """Return an answer as it is judged, None if it repeats the question.

    Words of the question behind a value are left out, and so is the formula that is asked for:
    `m+n=7` is 7. A formula of the question, or a part of one, is an answer only where it is the
    gold answer's text.
    """
    if not question or len(answer) > MAX_ANSWER_CHARS:
        return answer
    if is_choice(gold):
        return choice_of(answer, question) or answer
    if words_of(tidy_text(gold)) is not None:
        return answer
    formulas = _formulas_of(question)
    # A side that the question asks for is no part of the answer: of `m+n=7` the 7 is.
    first, *later_sides = split_outside_brackets(tidy_text(answer), "=")
    names_what_is_asked = later_sides and f"\n{_spelling(first)}\n" in formulas
    value = without_unit(
        "=".join(later_sides) if names_what_is_asked else tidy_text(answer), question
    )
    whole = _spelling(value)
    last = _spelling(split_outside_brackets(value, "=")[-1])
    gold_sides = (gold, *split_outside_brackets(tidy_text(gold), "="))
    if last in {_spelling(side) for side in gold_sides}:
        return value
    # A number or a letter alone may stand in the question and be the answer all the same.
    texts = [re.escape(text) for text in {whole, last} if not _LONE_VALUE.fullmatch(text)]
    is_repeated = any(
        re.search(rf"(?<![\w.\\^]){text}(?![\w^_!]|\.\d)", formulas) for text in texts
    )
    return None if is_repeated else value


def _spelling(text: str) -> str:
    return apply_rewrites(normal_form(text), FORMULA_SPELLINGS).strip(".,;")


@functools.lru_cache(maxsize=256)
def _formulas_of(question: str) -> str:
    """Return the formulas of a question, each on a line of its own."""
    formulas = [next(filter(None, groups)) for groups in _FORMULA.findall(question)]
    # What stands between the words of a plain text may be a formula too.
    unmarked = _WORDS.sub("\n", _FORMULA.sub("\n", question)).splitlines()
    return "\n".join(("", *(_spelling(text) for text in formulas + unmarked if text.strip()), ""))
