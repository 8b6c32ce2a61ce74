"""Answers that are words, choices and dates. Pure."""

import itertools
import re

from prefixrl.scorer.verifier.rules.guards import PATTERNS
from prefixrl.scorer.verifier.rules.units import without_unit


def unwrapped(text: str) -> str:
    r"""Move text out of `\text{}`."""
    return " ".join(
        PATTERNS["text"].sub(r" \1 ", text).replace(r"\ ", " ").replace("~", " ").split()
    )


def words_of(text: str) -> str | None:
    """Return an answer that is text as it is compared: small letters, parts in order; else None.

    A product of letters is none: it has fewer than three, or no vowel, or is a run of the alphabet.
    """
    plain = unwrapped(text).removesuffix(".")
    if not PATTERNS["plain"].fullmatch(plain) or not any(
        map(is_word, PATTERNS["letters"].findall(plain))
    ):
        return None
    pieces = PATTERNS["joined"].split(plain)
    parts = (
        "".join(PATTERNS["article"].sub("", part.strip().casefold()).split()) for part in pieces
    )
    return ",".join(sorted(parts))


def is_word(letters: str) -> bool:
    """Return True if letters are a word rather than a product."""
    low = letters.casefold()
    if PATTERNS["functions"].fullmatch(f"\\{low}") or low in ("inf", "infinity", "lim", "and"):
        return False
    is_run = all(ord(b) - ord(a) == 1 for a, b in itertools.pairwise(low))
    return low == "no" or (len(low) >= 3 and not is_run and any(vowel in low for vowel in "aeiou"))


_SMALL = frozenset("abcd")
_REPLIES = frozenset(("yes", "no", "true", "false"))


def choice_of(text: str, known: str = "") -> str | None:
    """Return the letter of a choice, None if it is none; "" if a second one is named, or it says more than is known.

    Behind the letter may stand a formula, a unit or a phrase of `known`: the question or the gold answer.
    """
    plain = unwrapped(text)
    found = PATTERNS["choice"].fullmatch(plain)
    if found is None or (found[1].islower() and plain.strip("().:") not in _SMALL):
        return None
    rest = found[2] or ""
    if _bare(rest) and _bare(rest) in _bare(known):
        return found[1].upper()
    said = {word.casefold() for word in PATTERNS["said"].findall(rest)}
    is_more = not said <= _REPLIES and without_unit(f"1 {' '.join(sorted(said))}", "") != "1"
    return "" if is_more or PATTERNS["second"].search(rest) else found[1].upper()


def is_choice(gold: str) -> bool:
    """Return True if a gold answer is the letter of a choice: `B`, `(B)`."""
    return re.fullmatch(r"\(?[A-J]\)?[.:]?", unwrapped(gold)) is not None


def is_same_moment(gold: str, answer: str) -> bool | None:
    """Compare a date or a time as written; None if the gold answer is neither."""
    if PATTERNS["date"].fullmatch(gold.strip()):
        numbers = [[int(part) for part in re.findall(r"\d+", text)] for text in (gold, answer)]
        return numbers[0] == numbers[1] and PATTERNS["date"].fullmatch(answer.strip()) is not None
    plain = (re.sub(r"[\s.{}]", "", unwrapped(text)).casefold() for text in (gold, answer))
    want, got = map(PATTERNS["time"].fullmatch, plain)
    if want is None or got is None or not (want[2] or got[2]):
        return None
    return want[1] == got[1] and (want[2] == got[2] or None in (want[2], got[2]))


def loose_text(gold: str, answer: str) -> bool:
    r"""Return True if `\text{}` is left that the gold answer lacks and that joins nothing: `7\text{ or so}`."""
    known = {
        *map(_bare, PATTERNS["text"].findall(gold)),
        "and",
        "or",
        "",
        "percent",
        "percentage",
        "pct",
    }
    return any(
        _bare(group) not in known and len(_bare(group)) > 1
        for group in PATTERNS["text"].findall(answer)
    )


def _bare(group: str) -> str:
    return "".join(re.findall(r"[A-Za-z\d]+", group)).casefold()
