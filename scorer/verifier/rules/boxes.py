r"""Several boxes in one sentence as one list, where the gold answer is a list.

"so \boxed{(2,2)} and \boxed{(6,2)}."  for "(2,2),(6,2)"  →  "(2,2),(6,2)"
"""

import re

from prefixrl.common.prompts.extract import THINK_CLOSE, extract_answer

_BETWEEN = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\\q?quad(?![a-zA-Z])|\\?text\{|\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))*")
_JOINS = re.compile(r"[,;]|and|or")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_BRACE = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)\s*\{|[{}]")
_AND = re.compile(r"\\text\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")


def joined_answer(text: str, gold: str) -> str | None:
    """Return the last boxes of a text as a list if the gold answer is one, else the last box."""
    last = extract_answer(text)
    if last is None or not is_list(gold):
        return last
    tail = text.rpartition(THINK_CLOSE)[2]
    found, after = list[str](), len(tail)
    for start, end in reversed(_boxes(tail)):
        between = tail[end:after]
        if found and not (_BETWEEN.fullmatch(between) and _JOINS.search(between)):
            break
        found.insert(0, extract_answer(tail[start:end]) or "")
        after = start
    return ",".join(found) if len(found) > 1 else last


def is_list(gold: str) -> bool:
    """Return True if commas, "and" or "or" outside of all brackets divide it."""
    plain = re.sub(r"\\\{|\\left|\\right|\\\}|\$", lambda each: {r"\{": "(", r"\}": ")"}.get(each[0], ""), gold).strip()
    if _GROUPED.fullmatch(plain.replace("{,}", ",").replace(r",\!", ",")):
        return False
    depth = 0
    for char in _AND.sub(",", plain):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            return True
    return False


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return where the closed boxes begin and end that are in no other."""
    found, opened = list[tuple[int, int]](), list[int]()
    for each in _BRACE.finditer(text):
        if each[0].endswith("{") and each[0] != r"\{":
            opened.append(each.start())
        elif each[0] == "}" and opened and text[start := opened.pop()] == "\\":
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, each.end()))
    return found
