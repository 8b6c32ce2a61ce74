r"""Removal of all that only changes the looks of an answer. Pure.

tidied      an answer for a parser: without delimiters, boxes, sizes of brackets and line breaks
normalise   an answer for comparison as a string: without spaces and wrappers too
"""

import re

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_REWRITES = (
    (r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\displaystyle(?![a-zA-Z])|\\\$", ""),
    (r"\^(?:\\circ|\{\\circ\})", ""),
    (r"\{,\}", ","),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:boxed|fbox)\s*", ""),
    (r"~|\\ ", " "),
    # Two kinds of spaces have a meaning and are kept, as "~": "3 4" is not 34, "1, 200" is not 1,200.
    (r"(?<=\d)\s+(?=\d)|(?<=\d,)\s+(?=\d{3}(?!\d))", "~"),
    (r"\s+", ""),
    (r"\\frac(\d)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}"),
    (r"_\{\\text\{(\w+)\}\}", r"_\1"),
    (r"_\{(\w+)\}", r"_\1"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\{:\}", ":"),
)
_SHAPE = re.compile(
    r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])|\\[!,;:]|\\displaystyle(?![a-zA-Z])|\\(?:boxed|fbox)(?![a-zA-Z])"
)


def tidied(answer: str) -> str:
    """Remove all that a parser need not see; spaces stay."""
    # Of a box within the box, the command alone: a parser would take the inner one for the whole.
    return " ".join(_SHAPE.sub("", bare(answer)).split())


def normalise(answer: str) -> str:
    """Remove what only changes the looks of an answer: delimiters, spacing, wrappers, styles."""
    text = _undelimited(answer).removesuffix(".")
    wrapped = _WRAPPER.fullmatch(text)
    text = wrapped.group(1).strip() if wrapped else text
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def bare(gold: str) -> str:
    """Remove delimiting dollars from a gold answer, stray ones included."""
    return re.sub(r"(?<!\\)\$", "", _undelimited(gold))


def _undelimited(text: str) -> str:
    text = text.strip()
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == f"{opening}{inner}{closing}" and "$" not in inner:
            return inner.strip()
    return text
