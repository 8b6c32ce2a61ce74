"""An answer beside the question, whose formulas are no answers. Pure."""

import functools
import re

from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.scorer.verifier.rules.guards import split_at
from prefixrl.scorer.verifier.rules.looks import SPELLINGS, normalise, rewritten, tidied
from prefixrl.scorer.verifier.rules.units import without_unit
from prefixrl.scorer.verifier.rules.words import choice_of, is_choice, words_of

_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\a-zA-Z{])[^\W\d_]{3,}(?![a-zA-Z}])|[?!:;](?=\s)")
_LONE = re.compile(r"[-+]?[\d.,~]*|\\?[a-zA-Z]|")


def beside_question(question: str, gold: str, answer: str) -> str | None:
    """Return an answer as it is judged, None if it repeats the question.

    Words of the question behind a value are left out, and so is the formula that is asked for: `m+n=7` is 7. A formula
    of the question, or a part of one, is an answer only where it is the gold answer's text.
    """
    if not question or len(answer) > MAX_ANSWER_CHARS:
        return answer
    if is_choice(gold):
        return choice_of(answer, question) or answer
    if words_of(tidied(gold)) is not None:
        return answer
    first, *rest = split_at(tidied(answer), "=")
    pieces = _pieces(question)
    value = without_unit(
        "=".join(rest) if rest and f"\n{_spelling(first)}\n" in pieces else tidied(answer), question
    )
    whole, last = _spelling(value), _spelling(split_at(value, "=")[-1])
    if last in {_spelling(each) for each in (gold, *split_at(tidied(gold), "="))}:
        return value
    texts = [re.escape(text) for text in {whole, last} if not _LONE.fullmatch(text)]
    is_repeated = any(re.search(rf"(?<![\w.\\^]){text}(?![\w^_!]|\.\d)", pieces) for text in texts)
    return None if is_repeated else value


def _spelling(text: str) -> str:
    return rewritten(normalise(text), SPELLINGS).strip(".,;")


@functools.lru_cache(maxsize=256)
def _pieces(question: str) -> str:
    """Return the formulas of a question, each on a line of its own."""
    found = [next(filter(None, groups)) for groups in _FORMULA.findall(question)]
    texts = found + _WORDS.sub("\n", _FORMULA.sub("\n", question)).splitlines()
    return "\n".join(("", *(_spelling(text) for text in texts if text.strip()), ""))
