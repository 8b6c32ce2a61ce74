r"""Answers that are words, choices, dates, and the words beside a value. Pure.

words_of      `\text{Even}` is "even"; None for an expression
is_choice     (B), B. and `\textbf{(B)}\ 12` name the choice B, unless a second one is named
without_unit  `5\text{ cm}` is 5; `3\text{ or 4}` stays what it is
"""

import itertools
import re

_GROUP = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)~?\s*\{([^{}]*)\}"
_TEXT = re.compile(_GROUP)
_UPRIGHT = r"\\(?:text|textrm|textnormal|mathrm|mbox)~?\s*\{([^{}]*)\}"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z\s,.'-]*")
_WORD = re.compile(r"[A-Za-z]+")
_FUNCTIONS = frozenset((
    "arccos", "arcsin", "arctan", "binom", "cos", "cosh", "cot", "csc", "det", "exp", "gcd", "inf", "infinity",
    "infty", "lcm", "lim", "log", "max", "min", "mod", "sec", "sin", "sinh", "sqrt", "tan", "tanh", "and",
))  # fmt: skip
_JOINED = re.compile(r",|\band\b")


def unwrapped(text: str) -> str:
    r"""Move text out of `\text{}`."""
    return " ".join(_TEXT.sub(r" \1 ", text).replace(r"\ ", " ").replace("~", " ").split())


def words_of(text: str) -> str | None:
    """Return an answer that is text as it is compared: small letters, parts in order; else None.

    A product of letters is none: it has fewer than three, or no vowel, or is a run of the alphabet.
    """
    plain = unwrapped(text).removesuffix(".")
    if not _PLAIN.fullmatch(plain) or not any(map(_is_word, _WORD.findall(plain))):
        return None
    parts = ("".join(part.casefold().split()) for part in _JOINED.split(plain))
    return ",".join(sorted(parts))


def _is_word(letters: str) -> bool:
    low = letters.casefold()
    if low in _FUNCTIONS:
        return False
    is_run = all(ord(b) - ord(a) == 1 for a, b in itertools.pairwise(low))
    return low == "no" or (len(low) >= 3 and not is_run and any(vowel in low for vowel in "aeiou"))


# --- choices --------------------------------------------------------------------------------------

_CHOICE = re.compile(r"(?:(?:option|choice|answer)\b[\s:]*)?\(?([A-J])(?:\s*[).:]\s*(.*))?", re.DOTALL | re.IGNORECASE)
_SECOND = re.compile(r"\(\s*[A-J]\s*\)|(?:^|\b(?:or|and)\s*|[\s,;.:)])\(?[A-J]\s*(?:[).:,;]|$|or\b|and\b)")
_SMALL = frozenset("abcd")


def choice_of(text: str) -> str | None:
    """Return the letter of a choice, "" if a second choice is named too, None if it is none."""
    plain = unwrapped(text)
    found = _CHOICE.fullmatch(plain)
    if found is None or (found.group(1).islower() and plain.strip("().:") not in _SMALL):
        return None
    return "" if _SECOND.search(found.group(2) or "") else found.group(1).upper()


def is_choice(gold: str) -> bool:
    """Return True if a gold answer is the letter of a choice: `B`, `(B)`."""
    return re.fullmatch(r"\(?[A-J]\)?[.:]?", unwrapped(gold)) is not None


# --- dates and times ------------------------------------------------------------------------------

_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|0\d/\d{1,2}|\d{1,2}/0\d")
_TIME = re.compile(r"(\d{1,2}:\d\d(?::\d\d)?)([ap]m)?")


def is_same_moment(gold: str, answer: str) -> bool | None:
    """Compare a date or a time as written; None if the gold answer is neither."""
    if _DATE.fullmatch(gold.strip()):
        return [int(part) for part in re.findall(r"\d+", gold)] == _date(answer)
    both = [_TIME.fullmatch(re.sub(r"[\s.{}]", "", unwrapped(text)).casefold()) for text in (gold, answer)]
    if both[0] is None or both[1] is None or not (both[0].group(2) or both[1].group(2)):
        return None
    if both[0].group(1) != both[1].group(1):
        return False
    return both[0].group(2) == both[1].group(2) or None in (both[0].group(2), both[1].group(2))


def _date(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)] if _DATE.fullmatch(text.strip()) else []


# --- units ----------------------------------------------------------------------------------------

_NO_UNIT = frozenset((
    "or", "and", "not", "if", "maybe", "perhaps", "possibly", "is", "are", "was", "for", "when", "where", "unless",
    "else", "otherwise", "but", "either", "neither", "than", "then", "to", "except", "without", "with", "no",
))  # fmt: skip
_MULTIPLES = frozenset((
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "percentage", "pct",
))  # fmt: skip
_SHORT = frozenset((
    "cm", "mm", "km", "dm", "kg", "mg", "ml", "mL", "ft", "in", "yd", "mi", "lb", "oz", "hr", "hrs", "sec", "min",
    "mph", "am", "pm", "sq", "cu", "kmh", "rad", "deg", "mol", "Hz", "kHz", "Pa", "kPa", "eV", "keV", "MeV", "kJ",
    "kW", "ms", "ns",
))  # fmt: skip
_RAISED = r"(?:\^\{?-?\d\}?)?"
_GROUPS = re.compile(rf"(?P<value>.*[\w)\]}}%!|'°])(?:\s|~|\\ |\\cdot|/)*{_UPRIGHT}{_RAISED}\s*\.?", re.DOTALL)
_BARE = re.compile(r"(.*[\d)}°])\s+([A-Za-z]+(?:(?:\s+|/)[A-Za-z]+)*)(?:\^\{?\d\}?)?\.?", re.DOTALL)
_CLOSE = re.compile(r"([-+]?\$?[\d.,]*\d)\s*([A-Za-z]{1,3})(?:\^\{?\d\}?)?\.?")
_LONE = frozenset("mgshLlVJWNKC")


def without_unit(text: str, *, is_gold: bool = False) -> str:
    """Return the value without the unit behind it; `million` is a unit in a gold answer only."""
    while (found := _GROUPS.fullmatch(text)) is not None and _is_unit(found.group(2), is_gold):
        text = found.group("value")
    found = _BARE.fullmatch(text)
    if found is not None:
        words = _WORD.findall(found.group(2))
        if _is_unit(found.group(2), is_gold) and all(word in _SHORT or _is_word(word) for word in words):
            return found.group(1)
    found = _CLOSE.fullmatch(text)
    if found is not None and (found.group(2) in _SHORT or (not is_gold and found.group(2) in _LONE)):
        return found.group(1)
    return text


def _is_unit(text: str, is_gold: bool) -> bool:
    words = {word.casefold() for word in _WORD.findall(text)}
    if not words or not re.fullmatch(r"[A-Za-z\s~./^°()'-]*", re.sub(r"\^\{?-?\d\}?", "", text)):
        return False
    return not words & _NO_UNIT and not (not is_gold and words & _MULTIPLES)


def loose_text(gold: str, answer: str) -> bool:
    r"""Return True if `\text{}` is left that the gold answer lacks and that joins nothing."""
    known = {_bare(group) for group in _TEXT.findall(gold)} | {"and", "or", "", "percent", "percentage", "pct"}
    return any(_bare(group) not in known and len(_bare(group)) > 1 for group in _TEXT.findall(answer))


def _bare(group: str) -> str:
    return "".join(re.findall(r"[A-Za-z\d]+", group)).casefold()
