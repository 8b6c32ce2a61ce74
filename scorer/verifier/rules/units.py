r"""Words behind a value that do not change it: units and counted things. Pure.

`5\text{ cm}` is 5; `3\text{ or 4}`, `3\text{ halves}` and `3\text{ x}` stay what they are. A word is dropped if it is
listed here, or stands in the question or the gold answer and does not join, deny or calculate.
"""

import re
from pathlib import Path

from prefixrl.scorer.verifier.rules.guards import PATTERNS

_LISTED, _REFUSED = (
    (Path(__file__).parent / "tables/units.txt").read_text(encoding="utf-8").split("\n---\n")
)
_UNITS = frozenset(_LISTED.split())
_CALCULATES = frozenset(_REFUSED.split())
"""Words that join, deny or calculate: no unit in an answer, wherever else they stand."""
_MULTIPLES = frozenset(("hundred", "thousand", "million", "billion", "trillion", "dozen"))
_LONE = frozenset("mgshLlVJWNC")


def without_unit(text: str, known: str, *, is_gold: bool = False) -> str:
    """Return the value without the words behind it; a gold answer's are dropped unless they join, deny or calculate.

    `known` is the question or the gold answer, whose words may stand behind a value too.
    """
    while (found := PATTERNS["groups"].fullmatch(text)) is not None and _are_units(
        found[2], known, is_gold
    ):
        text = found["value"]
    if (found := PATTERNS["bare"].fullmatch(text)) is not None and _are_units(
        found[2], known, is_gold
    ):
        return found[1]
    if (found := PATTERNS["close"].fullmatch(text)) is None:
        return text
    is_unit = (
        _is_unit(found[2], "") if len(found[2].encode()) > 1 else found[2] in _LONE and not is_gold
    )
    return found[1] if is_unit else text


def _are_units(text: str, known: str, is_gold: bool) -> bool:
    plain = text.replace(r"\Omega", "Ω").replace(r"\mu", "μ")
    words = PATTERNS["between"].sub(" ", plain).split()
    if is_gold:
        return bool(words) and all(
            word.isalpha() and word.casefold() not in _CALCULATES - _MULTIPLES for word in words
        )
    return bool(words) and all(_is_unit(word, known) for word in words)


def _is_unit(word: str, known: str) -> bool:
    low = word.casefold()
    forms = (low, low.removesuffix("s"), low.removesuffix("es"), re.sub("^(?:平方|立方)", "", low))
    if word in _UNITS or PATTERNS["prefixed"].fullmatch(word) or not _UNITS.isdisjoint(forms):
        return True
    is_word = (len(word) > 2 and word.isalpha()) or not word.isascii()
    return (
        is_word
        and low not in _CALCULATES
        and any(_stands_in(each, known) for each in forms if len(each) > 2)
    )


def _stands_in(word: str, text: str) -> bool:
    edges = (r"(?<![^\W\d_])", r"(?:e?s)?(?![^\W\d_])") if word.isascii() else ("", "")
    return re.search(edges[0] + re.escape(word) + edges[1], text, re.IGNORECASE) is not None
