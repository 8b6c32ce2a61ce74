r"""Several boxes in one sentence as one list, where the gold answer is a list.

"so \boxed{(2,2)} and \boxed{(6,2)}."  for "(2,2),(6,2)"  →  "(2,2),(6,2)"
"""

import re

from prefixrl.common.prompts.extract import THINK_CLOSE, boxes_in, extract_answer
from prefixrl.scorer.verifier.rules.guards import list_values

_BETWEEN = re.compile(
    r"(?:[\s$,;]|\\[()\[\]]|\\q?quad(?![a-zA-Z])|\\?text\{|\}"
    r"|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))*"
)
_JOINS = re.compile(r"[,;]|and|or")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def joined_answer(text: str, gold: str) -> str | None:
    """Return the last boxes of a text as a list if the gold answer is one, else the last box."""
    last = extract_answer(text)
    if last is None or not is_list(gold):
        return last
    tail = text.rpartition(THINK_CLOSE)[2]
    contents: list[str] = []
    next_start = len(tail)
    for box in reversed(boxes_in(tail)):
        between = tail[box.end : next_start]
        if contents and not (_BETWEEN.fullmatch(between) and _JOINS.search(between)):
            break
        contents.insert(0, box.content)
        next_start = box.start
    return ",".join(contents) if len(contents) > 1 else last


def is_list(gold: str) -> bool:
    """Return True if commas, "and" or "or" outside of all brackets divide it."""
    plain = gold.replace("{,}", ",").replace(r",\!", ",").strip(" $")
    return _GROUPED.fullmatch(plain) is None and len(list_values(plain)) > 1
