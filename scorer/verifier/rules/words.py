"""Answers that are words, choices and dates. Pure."""

import itertools
import re

from prefixrl.scorer.verifier.rules.guards import FUNCTIONS
from prefixrl.scorer.verifier.rules.units import without_unit

_TEXT = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it)|mbox)~?\s*\{([^{}]*)\}")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z\s,.'-]*")
_WORD = re.compile(r"[A-Za-z]+")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_JOINED = re.compile(r",|\band\b")


def unwrapped(text: str) -> str:
    r"""Move text out of `\text{}`."""
    return " ".join(_TEXT.sub(r" \1 ", text).replace(r"\ ", " ").replace("~", " ").split())


def words_of(text: str) -> str | None:
    """Return an answer that is text as it is compared: small letters, parts in order; else None.

    A product of letters is none: it has fewer than three, or no vowel, or is a run of the alphabet.
    """
    plain = unwrapped(text).removesuffix(".")
    if not _PLAIN.fullmatch(plain) or not any(map(is_word, _WORD.findall(plain))):
        return None
    parts = ("".join(_ARTICLE.sub("", part.strip().casefold()).split()) for part in _JOINED.split(plain))
    return ",".join(sorted(parts))


def is_word(letters: str) -> bool:
    """Return True if letters are a word rather than a product."""
    low = letters.casefold()
    if FUNCTIONS.fullmatch(f"\\{low}") or low in ("inf", "infinity", "lim", "and"):
        return False
    is_run = all(ord(b) - ord(a) == 1 for a, b in itertools.pairwise(low))
    return low == "no" or (len(low) >= 3 and not is_run and any(vowel in low for vowel in "aeiou"))


_CHOICE = re.compile(r"(?:(?:option|choice|answer)\b[\s:]*)?\(?([A-J])(?:\s*[).:]\s*(.*))?", re.DOTALL | re.IGNORECASE)
_SECOND = re.compile(r"(?:^|[\s,;.:)|\\])\(?[A-J]\s*(?:[).:,;|]|$)|[|\\]\s*[A-J]\b")
_SMALL = frozenset("abcd")
_SAID = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,}")
_REPLIES = frozenset(("yes", "no", "true", "false"))


def choice_of(text: str, known: str = "") -> str | None:
    """Return the letter of a choice, None if it is none; "" if a second one is named, or it says more than is known.

    Behind the letter may stand a formula, a unit or a phrase of `known`: the question or the gold answer.
    """
    plain = unwrapped(text)
    found = _CHOICE.fullmatch(plain)
    if found is None or (found[1].islower() and plain.strip("().:") not in _SMALL):
        return None
    rest = found[2] or ""
    if _bare(rest) and _bare(rest) in _bare(known):
        return found[1].upper()
    said = {word.casefold() for word in _SAID.findall(rest)}
    is_more = not said <= _REPLIES and without_unit(f"1 {' '.join(sorted(said))}", "") != "1"
    return "" if is_more or _SECOND.search(rest) else found[1].upper()


def is_choice(gold: str) -> bool:
    """Return True if a gold answer is the letter of a choice: `B`, `(B)`."""
    return re.fullmatch(r"\(?[A-J]\)?[.:]?", unwrapped(gold)) is not None


_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|0\d/\d{1,2}|\d{1,2}/0\d")
_TIME = re.compile(r"(\d{1,2}:\d\d(?::\d\d)?)([ap]m)?")


def is_same_moment(gold: str, answer: str) -> bool | None:
    """Compare a date or a time as written; None if the gold answer is neither."""
    if _DATE.fullmatch(gold.strip()):
        numbers = [[int(part) for part in re.findall(r"\d+", text)] for text in (gold, answer)]
        return numbers[0] == numbers[1] and _DATE.fullmatch(answer.strip()) is not None
    want, got = (_TIME.fullmatch(re.sub(r"[\s.{}]", "", unwrapped(text)).casefold()) for text in (gold, answer))
    if want is None or got is None or not (want[2] or got[2]):
        return None
    return want[1] == got[1] and (want[2] == got[2] or None in (want[2], got[2]))


def loose_text(gold: str, answer: str) -> bool:
    r"""Return True if `\text{}` is left that the gold answer lacks and that joins nothing: `7\text{ or so}`."""
    known = {_bare(group) for group in _TEXT.findall(gold)} | {"and", "or", "", "percent", "percentage", "pct"}
    return any(_bare(group) not in known and len(_bare(group)) > 1 for group in _TEXT.findall(answer))


def _bare(group: str) -> str:
    return "".join(re.findall(r"[A-Za-z\d]+", group)).casefold()
