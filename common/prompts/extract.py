r"""The part of a completion that is the answer: pure, no grading.

"... so <think>\boxed{3}?</think> the answer is \boxed{\frac{1}{2}}."  →  "\frac{1}{2}"
"""

import re

MAX_ANSWER_CHARS = 512
"""A longer answer is not parsed: `verify.refusal` names it, the verdict is `parse_fail`."""

THINK_CLOSE = "</think>"
_TOKEN = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)\s*\{|[{}]")


def extract_answer(text: str) -> str | None:
    r"""Return the stripped content of the last closed `\boxed{}` or `\fbox{}` after `</think>`.

    Of boxes within boxes the outermost counts. None where no box is closed or the last one is blank: an answer that was
    cut off is no answer. One pass: a text made of nothing but `\boxed{` costs no more than any other.
    """
    tail = text.rpartition(THINK_CLOSE)[2]
    opened: list[int] = []  # where each open brace's content begins; negative unless the brace belongs to a box
    answer: str | None = None
    for token in _TOKEN.finditer(tail):
        kind = token.group()
        if kind == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                answer = tail[start : token.start()]
        elif kind == "{":
            opened.append(-1)
        elif kind.endswith("{") and kind != r"\{":
            opened.append(token.end())
    return (answer or "").strip() or None
