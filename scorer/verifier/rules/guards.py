"""Answers that math-verify accepts wrongly, found from the text alone; the parts of lists and tuples. Pure."""

import re
import tomllib
from pathlib import Path

PATTERNS: dict[str, re.Pattern[str]] = {}
"""Patterns of this file, equations.py, words.py and units.py; `<<name>>` in one is an earlier one."""
for _name, _text in tomllib.loads(
    (Path(__file__).parent / "tables/patterns.toml").read_text(encoding="utf-8")
).items():
    PATTERNS[_name] = re.compile(
        re.sub("<<(.*?)>>", lambda found: PATTERNS[found[1]].pattern, _text)
    )


def free_letters(text: str) -> set[str]:
    """Return the letters that are no constant and bound by no sum, limit or integral."""
    text = PATTERNS["named"].sub("", text)
    found = {
        each
        for word in PATTERNS["variable"].findall(text)
        for each in ([word] if word[0] == "\\" else word)
    }
    if any(map(PATTERNS["operators"].fullmatch, found)):
        found -= {letter for pair in PATTERNS["bound"].findall(text) for letter in pair} | {"d"}
    return {each for each in found if each[0] != "\\" or PATTERNS["greek"].fullmatch(each)} - {
        "e",
        "i",
    }


def leaves_undone(gold: str, answer: str, gold_is_number: bool) -> bool:
    r"""Return True if the answer has work or parts that the gold answer lacks: `\int_0^1 2x dx`, `3\ldots`, `3_7`.

    If the gold answer is a number, any function name counts too: `\sqrt{100}` repeats the question.
    """
    patterns = (
        (PATTERNS["undone"], PATTERNS["functions"]) if gold_is_number else (PATTERNS["undone"],)
    )
    return any(set(pattern.findall(answer)) - set(pattern.findall(gold)) for pattern in patterns)


def has_numbers_side_by_side(answer: str) -> bool:
    """Return True for `7 5` or `7 {5}`, at best a product not carried out; math-verify adds them up."""
    return PATTERNS["side_by_side"].search(answer) is not None


def differs_in_kind(gold: str, answer: str, gold_is_number: bool) -> bool:
    """Return True if one is a tuple (or interval) and the other a set, a list or a number."""
    is_wanted, is_given = bool(tuple_elements(gold)), bool(tuple_elements(answer))
    other = gold if is_given else answer
    is_many = gold_is_number or other.startswith(r"\{") or len(split_at(other, ",")) > 1
    return is_wanted is not is_given and is_many


def lists_more(gold: str, answer: str) -> bool:
    r"""Return True if the answer lists more values than the gold answer, equal ones or not: `12,12` is not 12."""
    want, got = (len(listed(re.sub(r"^\\\{(.*)\\\}$", r"\1", text))) for text in (gold, answer))
    return got > want and re.search(r"\\(?:pm|cup)(?![a-zA-Z])", gold) is None


def tuple_elements(text: str) -> list[str]:
    """Return the elements of a tuple or interval, none if the text is neither."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return []
    elements = split_at(text[1:-1], ",")
    return elements if len(elements) > 1 else []


def listed(text: str) -> list[str]:
    """Return the values that commas, semicolons, "and" or "or" divide outside of brackets."""
    return [part for part in split_at(PATTERNS["divides"].sub(",", text), ",") if part.strip()]


def split_at(text: str, mark: str) -> list[str]:
    """Cut at every mark outside of brackets; not at all if brackets are not balanced."""
    if mark not in text:
        return [text]
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return [text]
        if char == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
