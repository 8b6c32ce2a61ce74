r"""Answers that math-verify accepts wrongly, found from the text alone. Pure.

free_letters      the variables of a text: a gold answer without any is met by an answer without any
leaves_undone     `\int_0^1 2x dx` or `\sqrt{100}` where the gold answer is a number: the question repeated
drops_a_part      `3\ldots` and `3_7` are not 3
has_numbers_side_by_side   `7 5` or `7 {5}`, which is added up
differs_in_kind   (1,2) is an ordered pair or an interval, {1,2} and 1,2 are not
"""

import re

GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi"
    r"|chi|psi|omega|ell|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)
_VARIABLE = re.compile(rf"{GREEK}|(?<![\\a-zA-Z])[a-zA-Z]+|\\[a-zA-Z]+")
_NAMED = re.compile(
    r"\\(?:begin\{array\}|begin|end|text[a-z]*|mathrm|mbox|operatorname|mathbb|mathcal|phantom)\s*\{[^{}]*\}|\\mathbb\s*[A-Z]"
)
_BOUND = re.compile(
    r"_\{?\s*([a-zA-Z])\s*(?:=|\\(?:to|in|rightarrow)(?![a-zA-Z]))|(?<=[^a-zA-Z])d\s*([a-z])(?![a-zA-Z])"
)


def free_letters(text: str) -> set[str]:
    """Return the letters that are no constant and bound by no sum, limit or integral."""
    text = _NAMED.sub("", text)
    found = {each for word in _VARIABLE.findall(text) for each in ([word] if word[0] == "\\" else word)}
    if any(_OPERATORS.fullmatch(each[1:]) for each in found):
        found -= {letter for pair in _BOUND.findall(text) for letter in pair} | {"d"}
    return {each for each in found if each[0] != "\\" or re.fullmatch(GREEK, each)} - {"e", "i"}


_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_OPERATORS = re.compile(r"i*int|lim|prod|sum")
_FUNCTIONS = re.compile(
    r"(?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|[dt]?binom|det|exp|gcd|lcm|lceil|lfloor|lg|ln|log|max|min|p?mod|sqrt|infty"
)


def leaves_undone(gold: str, answer: str, gold_is_number: bool) -> bool:
    """Return True if the answer is an unevaluated expression where the gold answer is its value.

    Unevaluated is a sum, product, limit or integral that the gold answer does not have. If the gold answer is a number,
    any function name counts too; a prime mark, which is a derivative, always does.
    """
    left = set(_COMMAND.findall(answer)) - set(_COMMAND.findall(gold))
    if any(_OPERATORS.fullmatch(command) for command in left) or ("'" in answer and "'" not in gold):
        return True
    return gold_is_number and any(_FUNCTIONS.fullmatch(command) for command in left)


_NUMBER = r"\d+(?:\.\d+)?"
_SPACE = r"(?:~|\\(?:q?quad|(?:thin|med|thick|en)space|enskip)(?![a-zA-Z])|\\text\{~?\})"
_SPACED = rf"\d\}}*{_SPACE}+\{{*{_NUMBER}"
_GROUPED = (
    rf"(?<![a-zA-Z\\{{}}\]^_])\{{+{_NUMBER}\}}+\{{*{_NUMBER}|(?<![a-zA-Z\d.^_}}])(?:{_NUMBER})\{{+{_NUMBER}\}}"
    rf"|^[(\[]{_NUMBER}[)\]]{_SPACE}*{_NUMBER}$"
)
_SIDE_BY_SIDE = re.compile(rf"(?:{_SPACED}|{_GROUPED})(?!\d|[\d.]*/|(?<=10)\^)")
"""Numbers with nothing but space or brackets between them, in normal form.

Not `3 1/2`, a mixed number, nor `2 10^3`, from which a sign is missing.
"""


def has_numbers_side_by_side(answer: str) -> bool:
    """Return True for numbers beside each other: at best a product that is not carried out.

    math-verify adds them up.
    """
    return _SIDE_BY_SIDE.search(answer) is not None


def differs_in_kind(gold: str, answer: str, gold_is_number: bool) -> bool:
    """Return True if one is a tuple (or interval) and the other a set, a list or a number."""
    want, got = _kind(gold), _kind(answer)
    if gold_is_number:
        return got == "tuple"
    return want != got and "tuple" in (want, got) and "" not in (want, got)


_DROPPED = re.compile(r"\\(?:[lcd]?dots[cbm]?|h?phantom|vphantom|equiv)(?![a-zA-Z])|\d_|\\pm\\infty")


def drops_a_part(gold: str, answer: str) -> bool:
    """Return True for dots, a base or an invisible part that the gold answer lacks."""
    return _DROPPED.search(answer) is not None and _DROPPED.search(gold) is None


def sides_of(text: str) -> list[str]:
    """Return the sides of an equation, ignoring equals signs within brackets (a sum's index)."""
    return split_at(text, "=")


def _kind(text: str) -> str:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    if len(split_at(text, ",")) > 1:
        return "list"
    return "tuple" if tuple_elements(text) else ""


def tuple_elements(text: str) -> list[str]:
    """Return the elements of a tuple or interval, none if the text is neither."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return []
    elements = split_at(text[1:-1], ",")
    return elements if len(elements) > 1 else []


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
