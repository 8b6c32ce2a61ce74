r"""The part of a completion that is the answer ("<think>\boxed{3}</think> \boxed{7}" → "7"): pure."""

import re
from typing import NamedTuple

MAX_ANSWER_CHARS = 512
"""A longer answer is not parsed: the verdict is `parse_fail`."""

THINK_CLOSE = "</think>"
_TOKEN = re.compile(
    r"\\\\|\\[{}]|\\(?:boxed|fbox)\s*(?:\{|([-+]?\d+(?:\.\d+)?)(?![\w\\^/!]|[.,]\d))|[{}]"
)
"""A box needs no braces around a number."""


class Box(NamedTuple):
    """A closed box: its content, and where the command begins and the box ends in its text."""

    content: str
    start: int
    end: int


def boxes_in(text: str) -> list[Box]:
    r"""Return the closed `\boxed{}` and `\fbox{}` that are in no other."""
    return read_boxes(text)[0]


def read_boxes(text: str) -> tuple[list[Box], bool]:
    r"""Return the closed boxes that are in no other, and True if a box is open at the end.

    One pass: a text made of nothing but `\boxed{` costs no more than any other.
    """
    boxes = list[Box]()
    opened = list[re.Match[str]]()
    for token in _TOKEN.finditer(text):
        kind = token.group()
        if token[1]:
            boxes.append(Box(token[1], token.start(), token.end()))
        elif kind.endswith("{") and kind != r"\{":
            opened.append(token)
        elif kind == "}" and opened and (box := opened.pop()).group() != "{":
            while boxes and boxes[-1].start > box.start():
                boxes.pop()
            boxes.append(Box(text[box.end() : token.start()].strip(), box.start(), token.end()))
    return boxes, any(token.group() != "{" for token in opened)


def extract_answer(text: str) -> str | None:
    """Return the content of the last closed box after `</think>`.

    None where no box is closed or the last one is blank: an answer that was cut off is no answer.
    """
    boxes = boxes_in(text.rpartition(THINK_CLOSE)[2])
    return (boxes[-1].content if boxes else "") or None
