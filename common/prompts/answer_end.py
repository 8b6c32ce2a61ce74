r"""The place where the final answer of a text is complete, found while the text is written: pure.

    ... so the answer is $\boxed{7}$.        not yet: the sentence, or another box of it, may follow
                                             complete: the paragraph of the last box has ended

What counts as an answer is what `extract.py` reads: the last closed box after `</think>`. A text that ends here has the
answer of the whole text, unless what would follow has another box or closes a thought that was not known to be open.
"""

import re

from prefixrl.common.prompts.extract import THINK_CLOSE, read_boxes

THINK_OPEN = "<think>"
_COMMAND = re.compile(r"\\(?:boxed|fbox)")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_PLACEHOLDER = re.compile(
    r"(?:\\[hv]?phantom\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}"
    r"|\\(?:square|Box|bigcirc|l?dots|q?quad|text\s*\{[^\w{}]*\}|[ ,;:!])|[^\w\\{}]|_)*"
)
"""Content of a box that the question draws, to be filled in."""


def is_answered(text: str, own_start: int = 0) -> bool:
    """Return True if a text has its final answer, and the paragraph of that answer has ended.

    Args:
        own_start: the end of a beginning that was given: a box that is closed within it is no answer of this text.
    """
    if not _COMMAND.search(text):
        return False
    tail = text.rpartition(THINK_CLOSE)[2]
    if THINK_OPEN in tail:
        return False
    boxes, is_open = read_boxes(tail)
    if is_open or not boxes or _PLACEHOLDER.fullmatch(boxes[-1].content):
        return False
    before = len(text) - len(tail)
    return before + boxes[-1].end > own_start and bool(_BLANK_LINE.search(tail, boxes[-1].end))


def open_thought(prompt: str) -> str:
    """Return the mark of a thought that a prompt leaves open, which is the beginning of the answer; else ""."""
    return THINK_OPEN if prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE) else ""


class AnswerWatch:
    """`is_answered` of a text that comes piece by piece."""

    def __init__(self, beginning: str = "") -> None:
        """Watch a text behind a `beginning` that another model, or the prompt, has written."""
        self._text = beginning
        self._own_start = len(beginning)

    def add_piece(self, piece: str) -> bool:
        """Append a piece; return True if the answer is complete with it."""
        self._text += piece
        # Nothing but the end of a line ends a paragraph.
        return "\n" in piece and is_answered(self._text, self._own_start)
