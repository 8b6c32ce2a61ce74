"""Answers that are words, choices and dates. Pure."""

import itertools
import re

from prefixrl.scorer.verifier.rules.guards import FUNCTION_NAME
from prefixrl.scorer.verifier.rules.units import without_unit

_TEXT_GROUP = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it)|mbox)~?\s*\{([^{}]*)\}")


def plain_text(text: str) -> str:
    r"""Move text out of `\text{}`."""
    return " ".join(_TEXT_GROUP.sub(r" \1 ", text).replace(r"\ ", " ").replace("~", " ").split())


_ONLY_WORDS = re.compile(r"[A-Za-z][A-Za-z\s,.'-]*")
_LETTERS = re.compile(r"[A-Za-z]+")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_COMMA_OR_AND = re.compile(r",|\band\b")


def words_of(text: str) -> str | None:
    """Return an answer that is text as it is compared: small letters, parts in order; else None.

    Letters that are a product are no text: fewer than three, or without a vowel, or a run of the
    alphabet.
    """
    plain = plain_text(text).removesuffix(".")
    if not _ONLY_WORDS.fullmatch(plain) or not any(map(is_word, _LETTERS.findall(plain))):
        return None
    parts = (
        "".join(_ARTICLE.sub("", part.strip().casefold()).split())
        for part in _COMMA_OR_AND.split(plain)
    )
    return ",".join(sorted(parts))


def is_word(letters: str) -> bool:
    """Return True if letters are a word rather than a product."""
    low = letters.casefold()
    if FUNCTION_NAME.fullmatch(f"\\{low}") or low in ("inf", "infinity", "lim", "and"):
        return False
    if low == "no":
        return True
    is_alphabet_run = all(ord(b) - ord(a) == 1 for a, b in itertools.pairwise(low))
    has_vowel = any(vowel in low for vowel in "aeiou")
    return len(low) >= 3 and not is_alphabet_run and has_vowel


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\b[\s:]*)?\(?([A-J])(?:\s*[).:]\s*(.*))?",
    re.DOTALL | re.IGNORECASE,
)
_SECOND_CHOICE = re.compile(r"(?:^|[\s,;.:)|\\])\(?[A-J]\s*(?:[).:,;|]|$)|[|\\]\s*[A-J]\b")
_WORD_BEHIND = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,}")
_SMALL_CHOICES = frozenset("abcd")
_REPLIES = frozenset(("yes", "no", "true", "false"))


def choice_of(text: str, context: str = "") -> str | None:
    """Return the letter of a choice; None for any other text; "" if a second choice is named, or more is said.

    Behind the letter may stand a formula, a unit or a phrase of `context`: the question or the gold
    answer.
    """
    plain = plain_text(text)
    match = _CHOICE.fullmatch(plain)
    if match is None or (match[1].islower() and plain.strip("().:") not in _SMALL_CHOICES):
        return None
    letter, tail = match[1].upper(), match[2] or ""
    if _letters_and_digits(tail) and _letters_and_digits(tail) in _letters_and_digits(context):
        return letter
    words = {word.casefold() for word in _WORD_BEHIND.findall(tail)}
    says_more = not words <= _REPLIES and without_unit(f"1 {' '.join(sorted(words))}", "") != "1"
    return "" if says_more or _SECOND_CHOICE.search(tail) else letter


_GOLD_CHOICE = re.compile(r"\(?[A-J]\)?[.:]?")


def is_choice(gold: str) -> bool:
    """Return True if a gold answer is the letter of a choice: `B`, `(B)`."""
    return _GOLD_CHOICE.fullmatch(plain_text(gold)) is not None


_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|0\d/\d{1,2}|\d{1,2}/0\d")
_TIME = re.compile(r"(\d{1,2}:\d\d(?::\d\d)?)([ap]m)?")


def is_same_moment(gold: str, answer: str) -> bool | None:
    """Compare a date or a time as written; None if the gold answer is neither."""
    if _DATE.fullmatch(gold.strip()):
        numbers = [[int(part) for part in re.findall(r"\d+", text)] for text in (gold, answer)]
        return numbers[0] == numbers[1] and _DATE.fullmatch(answer.strip()) is not None
    gold_time, answer_time = (
        _TIME.fullmatch(re.sub(r"[\s.{}]", "", plain_text(text)).casefold())
        for text in (gold, answer)
    )
    if gold_time is None or answer_time is None or not (gold_time[2] or answer_time[2]):
        return None
    # "3:00 pm" is the same as "3:00": only one of them says the half of the day.
    is_same_half = gold_time[2] == answer_time[2] or None in (gold_time[2], answer_time[2])
    return gold_time[1] == answer_time[1] and is_same_half


_HARMLESS_TEXT = frozenset(("and", "or", "", "percent", "percentage", "pct"))


def has_loose_text(gold: str, answer: str) -> bool:
    r"""Return True if `\text{}` is left that the gold answer lacks and that joins nothing: `7\text{ or so}`."""
    gold_groups = set(map(_letters_and_digits, _TEXT_GROUP.findall(gold)))
    return any(
        len(group) > 1 and group not in gold_groups and group not in _HARMLESS_TEXT
        for group in map(_letters_and_digits, _TEXT_GROUP.findall(answer))
    )


def _letters_and_digits(text: str) -> str:
    return "".join(re.findall(r"[A-Za-z\d]+", text)).casefold()
