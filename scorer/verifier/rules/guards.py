"""Answers that math-verify accepts wrongly, found from the text alone; the parts of lists and tuples. Pure."""

import re

from prefixrl.scorer.verifier.rules.looks import ENDS_WORD

GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|(?:var)?phi|chi|psi|omega|ell"
    rf"|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega){ENDS_WORD}"
)
_GREEK_LETTER = re.compile(GREEK)
_LETTERS_OR_COMMAND = re.compile(rf"{GREEK}|(?<![\\a-zA-Z])[a-zA-Z]+|\\[a-zA-Z]+")
_TEXT_AND_NAMES = re.compile(
    r"\\(?:begin\{array\}|begin|end|text|mathrm|operatorname|mathbb|mathcal|phantom)\s*\{[^{}]*\}"
    r"|\\mathbb\s*[A-Z]|(?<![a-zA-Z])infinity"
)
_BOUND_LETTER = re.compile(
    rf"_\{{?\s*([a-zA-Z])\s*(?:=|\\(?:to|in|rightarrow){ENDS_WORD})"  # below a sum or a limit
    rf"|(?<=[^a-zA-Z])d\s*([a-z]){ENDS_WORD}"  # behind an integral
)
_OPERATOR = re.compile(rf"\\(?:i*int|lim|prod|sum){ENDS_WORD}")
_CONSTANTS = {"e", "i"}


def free_letters(text: str) -> set[str]:
    """Return the letters that are no constant and bound by no sum, limit or integral."""
    text = _TEXT_AND_NAMES.sub("", text)
    letters = {
        letter
        for word in _LETTERS_OR_COMMAND.findall(text)
        for letter in ([word] if word[0] == "\\" else word)
    }
    if any(map(_OPERATOR.fullmatch, letters)):
        letters -= {letter for pair in _BOUND_LETTER.findall(text) for letter in pair} | {"d"}
    # Other commands than Greek letters name no variable.
    variables = {
        letter for letter in letters if letter[0] != "\\" or _GREEK_LETTER.fullmatch(letter)
    }
    return variables - _CONSTANTS


# A sum not carried out, a part that is not seen, a base, a derivative.
_UNDONE = re.compile(
    rf"\\(?:i*int|lim|prod|sum|dots|[hv]?phantom|equiv){ENDS_WORD}"
    r"|(?<=\d)_|\\pm\\infty|'|\\frac\{(?:d|\\partial)\}\{(?:d[a-z]|\\partial)"
)
FUNCTION_NAME = re.compile(
    r"\\(?:(?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|[dt]?binom|det|exp|gcd|lcm|lceil|lfloor|lg|ln|log"
    rf"|max|min|p?mod|sqrt|infty|cup|cap|setminus|[lr]?[vV]ert){ENDS_WORD}|\|"
)


def leaves_undone(gold: str, answer: str, gold_is_number: bool) -> bool:
    r"""Return True if the answer has work or parts that the gold answer lacks: `\int_0^1 2x dx`, `3\ldots`, `3_7`.

    If the gold answer is a number, any function name counts too: `\sqrt{100}` repeats the question.
    """
    patterns = (_UNDONE, FUNCTION_NAME) if gold_is_number else (_UNDONE,)
    return any(set(pattern.findall(answer)) - set(pattern.findall(gold)) for pattern in patterns)


_NUMBER = r"\d+(?:\.\d+)?"
_SPACED_NUMBERS = rf"\d\}}*~+\{{*{_NUMBER}"
_BRACED_NUMBERS = (
    rf"(?<![a-zA-Z\\{{}}\]^_])\{{+{_NUMBER}\}}+\{{*{_NUMBER}"
    rf"|(?<![a-zA-Z\d.^_}}])(?:{_NUMBER})\{{+{_NUMBER}\}}"
    rf"|^[(\[]{_NUMBER}[)\]]~*{_NUMBER}$"
)
# In normal form, with nothing but space or brackets between them. Not `3 1/2`, a mixed number, nor
# `2 10^3`, from which a sign is missing.
_SIDE_BY_SIDE = re.compile(rf"(?:{_SPACED_NUMBERS}|{_BRACED_NUMBERS})(?!\d|[\d.]*/|(?<=10)\^)")


def has_numbers_side_by_side(answer: str) -> bool:
    """Return True for `7 5` or `7 {5}`, at best a product not carried out; math-verify adds them up."""
    return _SIDE_BY_SIDE.search(answer) is not None


def differs_in_kind(gold: str, answer: str, gold_is_number: bool) -> bool:
    """Return True if one is a tuple (or interval) and the other a set, a list or a number."""
    is_gold_tuple = bool(tuple_elements(gold))
    is_answer_tuple = bool(tuple_elements(answer))
    other = gold if is_answer_tuple else answer
    is_other_list = other.startswith(r"\{") or len(split_outside_brackets(other, ",")) > 1
    return is_gold_tuple is not is_answer_tuple and (gold_is_number or is_other_list)


_BRACED_SET = re.compile(r"^\\\{(.*)\\\}$")
_SEVERAL_VALUES = re.compile(rf"\\(?:pm|cup){ENDS_WORD}")


def lists_more(gold: str, answer: str) -> bool:
    r"""Return True if the answer lists more values than the gold answer, equal ones or not: `12,12` is not 12."""
    gold_values, answer_values = (
        len(list_values(_BRACED_SET.sub(r"\1", text))) for text in (gold, answer)
    )
    return answer_values > gold_values and _SEVERAL_VALUES.search(gold) is None


def tuple_elements(text: str) -> list[str]:
    """Return the elements of a tuple or interval; nothing if the text is neither."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return []
    elements = split_outside_brackets(text[1:-1], ",")
    return elements if len(elements) > 1 else []


def _joining(word: str) -> str:
    return (
        rf"\\(?:text|mathrm)\{{[~ ]*{word}[~ ]*\}}"
        rf"|(?<![a-zA-Z\\]){word}{ENDS_WORD}"
    )


OR = re.compile(rf"{_joining('or')}|\\(?:lor|vee){ENDS_WORD}")
_BETWEEN_VALUES = re.compile(rf"{OR.pattern}|{_joining('and')}|\\(?:wedge|land){ENDS_WORD}|;")


def list_values(text: str) -> list[str]:
    """Return the values that commas, semicolons, "and" or "or" divide outside of brackets."""
    parts = split_outside_brackets(_BETWEEN_VALUES.sub(",", text), ",")
    return [part for part in parts if part.strip()]


def split_outside_brackets(text: str, mark: str) -> list[str]:
    """Cut at every mark outside of brackets; not at all if brackets are not balanced."""
    if mark not in text:
        return [text]
    parts = [""]
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return [text]
        if char == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
