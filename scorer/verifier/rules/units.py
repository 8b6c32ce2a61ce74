r"""Words behind a value that do not change it: units and counted things. Pure.

`5\text{ cm}` is 5; `3\text{ or 4}`, `3\text{ halves}` and `3\text{ x}` stay what they are. A word
is dropped if `units.txt` lists it, or if it stands in the question or the gold answer and does not
join, deny or calculate.
"""

import re
from pathlib import Path

_LISTED, _REFUSED = (
    Path(__file__).with_name("units.txt").read_text(encoding="utf-8").split("\n---\n")
)
_UNITS = frozenset(_LISTED.split())
_CALCULATES = frozenset(_REFUSED.split())
"""Words that join, deny or calculate: no unit in an answer, wherever else they stand."""
_MULTIPLES = frozenset(("hundred", "thousand", "million", "billion", "trillion", "dozen"))
_ONE_LETTER_UNITS = frozenset("mgshLlVJWNC")
_PREFIXED_UNIT = re.compile(
    r"(?:[kKMGTcdmnpfhμµ]|da)?"
    r"(?:m|g|s|L|l|J|W|Wh|N|Hz|Pa|V|A|C|K|F|T|eV|mol|cd|Ω|Ohm|B|Wb|Bq|Sv)"
)

_LETTER = r"[^\W\d_]"
_TEXT_GROUP = r"\\(?:text|mathrm)~?\s*\{((?:[^{}]|\^\{[^{}]*\})*)\}"
_EXPONENT = r"(?:\^\{?-?\d\}?)?"
# `5\text{ cm}^2`
_VALUE_AND_GROUP = re.compile(
    rf"(?P<value>.*[\w)\]}}%!|'°])(?<!\\cdot)(?:\s|~|\\cdot|/)*{_TEXT_GROUP}{_EXPONENT}\s*\.?",
    re.DOTALL,
)
# `5 square meters`
_VALUE_AND_WORDS = re.compile(
    rf"(.*[\d)}}°])\s+({_LETTER}{{2,}}(?:(?:\s+|/){_LETTER}+)*){_EXPONENT}\.?", re.DOTALL
)
# `5cm`, `5元`
_NUMBER_AND_UNIT = re.compile(
    rf"([-+]?\$?[\d.,]*\d)\s*({_LETTER}{{1,3}}|[^\x00-\x7f\s]+){_EXPONENT}\.?"
)
_BETWEEN_UNITS = re.compile(r"\\(?:cdot|times)(?![a-zA-Z])|\^\{?[-+]?\d\}?|[\s~./()'°²³·-]")


def without_unit(text: str, context: str, *, is_gold: bool = False) -> str:
    """Return the value without the words behind it; a gold answer's are dropped unless they join, deny or calculate.

    `context` is the question or the gold answer, whose words may stand behind a value too.
    """
    while (match := _VALUE_AND_GROUP.fullmatch(text)) is not None and _are_units(
        match[2], context, is_gold
    ):
        text = match["value"]
    match = _VALUE_AND_WORDS.fullmatch(text)
    if match is not None and _are_units(match[2], context, is_gold):
        return match[1]
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        return text
    number, unit = match[1], match[2]
    if len(unit.encode()) > 1:
        return number if _is_unit(unit, "") else text
    # A letter alone may be a factor: in a gold answer it is one.
    return number if unit in _ONE_LETTER_UNITS and not is_gold else text


def _are_units(text: str, context: str, is_gold: bool) -> bool:
    plain = text.replace(r"\Omega", "Ω").replace(r"\mu", "μ")
    words = _BETWEEN_UNITS.sub(" ", plain).split()
    if not words:
        return False
    if is_gold:
        return all(
            word.isalpha() and word.casefold() not in _CALCULATES - _MULTIPLES for word in words
        )
    return all(_is_unit(word, context) for word in words)


def _is_unit(word: str, context: str) -> bool:
    low = word.casefold()
    # The singular; a Chinese unit without "square" or "cubic".
    forms = (low, low.removesuffix("s"), low.removesuffix("es"), re.sub("^(?:平方|立方)", "", low))
    if word in _UNITS or _PREFIXED_UNIT.fullmatch(word) or not _UNITS.isdisjoint(forms):
        return True
    is_word = (len(word) > 2 and word.isalpha()) or not word.isascii()
    if not is_word or low in _CALCULATES:
        return False
    return any(_stands_in(form, context) for form in forms if len(form) > 2)


def _stands_in(word: str, text: str) -> bool:
    pattern = re.escape(word)
    if word.isascii():  # as a whole word, or its plural
        pattern = rf"(?<!{_LETTER}){pattern}(?:e?s)?(?!{_LETTER})"
    return re.search(pattern, text, re.IGNORECASE) is not None
