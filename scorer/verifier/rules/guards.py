"""Answers that math-verify accepts wrongly, found from the text alone; the parts of lists and tuples. Pure."""

import re

GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi"
    r"|chi|psi|omega|ell|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)
_VARIABLE = re.compile(rf"{GREEK}|(?<![\\a-zA-Z])[a-zA-Z]+|\\[a-zA-Z]+")
_NAMED = re.compile(
    r"\\(?:begin\{array\}|begin|end|text|mathrm|operatorname|mathbb|mathcal|phantom)\s*\{[^{}]*\}"
    r"|\\mathbb\s*[A-Z]|(?<![a-zA-Z])infinity"
)
_BOUND = re.compile(
    r"_\{?\s*([a-zA-Z])\s*(?:=|\\(?:to|in|rightarrow)(?![a-zA-Z]))|(?<=[^a-zA-Z])d\s*([a-z])(?![a-zA-Z])"
)


def free_letters(text: str) -> set[str]:
    """Return the letters that are no constant and bound by no sum, limit or integral."""
    text = _NAMED.sub("", text)
    found = {each for word in _VARIABLE.findall(text) for each in ([word] if word[0] == "\\" else word)}
    if any(map(_OPERATORS.fullmatch, found)):
        found -= {letter for pair in _BOUND.findall(text) for letter in pair} | {"d"}
    return {each for each in found if each[0] != "\\" or re.fullmatch(GREEK, each)} - {"e", "i"}


_OPERATORS = re.compile(r"\\(?:i*int|lim|prod|sum)(?![a-zA-Z])")
_UNDONE = re.compile(
    r"\\(?:i*int|lim|prod|sum|dots|[hv]?phantom|equiv)(?![a-zA-Z])|(?<=\d)_|\\pm\\infty|'"
    r"|\\frac\{(?:d|\\partial)\}\{(?:d[a-z]|\\partial)"
)
"""A sum not carried out, a part that is not seen, a base, a derivative."""
FUNCTIONS = re.compile(
    r"\\(?:(?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|[dt]?binom|det|exp|gcd|lcm|lceil|lfloor|lg|ln|log|max|min|p?mod|sqrt"
    r"|infty|cup|cap|setminus|[lr]?[vV]ert)(?![a-zA-Z])|\|"
)


def leaves_undone(gold: str, answer: str, gold_is_number: bool) -> bool:
    r"""Return True if the answer has work or parts that the gold answer lacks: `\int_0^1 2x dx`, `3\ldots`, `3_7`.

    If the gold answer is a number, any function name counts too: `\sqrt{100}` repeats the question.
    """
    patterns = (_UNDONE, FUNCTIONS) if gold_is_number else (_UNDONE,)
    return any(set(pattern.findall(answer)) - set(pattern.findall(gold)) for pattern in patterns)


_NUMBER = r"\d+(?:\.\d+)?"
_SPACED = rf"\d\}}*~+\{{*{_NUMBER}"
_GROUPED = (
    rf"(?<![a-zA-Z\\{{}}\]^_])\{{+{_NUMBER}\}}+\{{*{_NUMBER}|(?<![a-zA-Z\d.^_}}])(?:{_NUMBER})\{{+{_NUMBER}\}}"
    rf"|^[(\[]{_NUMBER}[)\]]~*{_NUMBER}$"
)
_SIDE_BY_SIDE = re.compile(rf"(?:{_SPACED}|{_GROUPED})(?!\d|[\d.]*/|(?<=10)\^)")
"""Numbers with nothing but space or brackets between them, in normal form.

Not `3 1/2`, a mixed number, nor `2 10^3`, from which a sign is missing.
"""


def has_numbers_side_by_side(answer: str) -> bool:
    """Return True for `7 5` or `7 {5}`, at best a product not carried out; math-verify adds them up."""
    return _SIDE_BY_SIDE.search(answer) is not None


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


_WRAPPED = r"\\(?:text|mathrm)\{{[~ ]*{0}[~ ]*\}}|(?<![a-zA-Z\\]){0}(?![a-zA-Z])"
OR = re.compile(rf"{_WRAPPED.format('or')}|\\(?:lor|vee)(?![a-zA-Z])")
_DIVIDES = re.compile(rf"{OR.pattern}|{_WRAPPED.format('and')}|\\(?:wedge|land)(?![a-zA-Z])|;")


def listed(text: str) -> list[str]:
    """Return the values that commas, semicolons, "and" or "or" divide outside of brackets."""
    return [part for part in split_at(_DIVIDES.sub(",", text), ",") if part.strip()]


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
