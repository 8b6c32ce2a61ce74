"""Doubts about a source that can be read: golds that no answer meets, repeated questions, other counts. Pure."""

import re
from collections import Counter
from collections.abc import Collection

from prefixrl.common.config.data import Reading
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.learner.data.columns import shown
from prefixrl.learner.data.rows import MARKS, Problem

MOST_WORDS = 12
CONTEXTS, OPTIONS = frozenset({"body", "input", "context", "passage"}), frozenset({"options", "choices"})
"""Names of columns, in small letters, that belong before and behind a question."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
"""A word that is no LaTeX command."""
_IDLE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_KINDS: dict[Reading, str] = {
    "after_hashes": "have the answer behind ####",
    "last_box": "have the answer in a box within a text",
    "before_unit": "end with a unit in brackets",
    "last_number": f"are prose (several lines, more than {MOST_WORDS} words or {MAX_ANSWER_CHARS} characters)",
}


def plain(question: str) -> str:
    """Return a question with no spaces but between words and numbers: copies of a set differ."""
    return _IDLE_SPACE.sub("", " ".join(question.split()))


class Doubts:
    """Counts over the problems of one source."""

    def __init__(self, judges_golds: bool) -> None:
        """`judges_golds`: False where the user has said that golds are meant as they are."""
        self._judges_golds = judges_golds
        self._golds: dict[str, str] = {}
        self._counts = Counter[str]()
        self._examples: dict[Reading, str] = {}
        self._readings = Counter[Reading]()

    def take(self, problem: Problem) -> None:
        """Count one problem."""
        question = plain("\n".join([*(said for _, said in problem.earlier), problem.question]))
        self._counts["all"] += 1
        self._counts["repeated"] += question in self._golds
        self._counts["contradicted"] += self._golds.setdefault(question, problem.gold) != problem.gold
        if self._judges_golds and problem.code != "tests" and (kind := _kind(problem.gold)):
            self._readings[kind] += 1
            self._examples.setdefault(kind, problem.gold)

    def lines(self, published: int | None, asked: str, unasked: Collection[str]) -> list[str]:
        """Return a warning per doubt.

        Args:
            published: the number of problems that the source is known to have.
            asked: the column of the question.
            unasked: columns of the rows that no problem takes.
        """
        counts, found = self._counts, []
        for kind, count in self._readings.items():
            found.append(
                f"{count} of {counts['all']} gold answers {_KINDS[kind]}, for example {shown(self._examples[kind])}: "
                f'an answer hardly equals one; set answer_reading = "{kind}", or "as_it_is" where they are meant so'
            )
        if published is not None and counts["all"] != published:
            found.append(f"{counts['all']} problems, {published} are published: other files, or bad rows?")
        if counts["repeated"]:
            found.append(
                f"{counts['repeated']} problems repeat a question, {counts['contradicted']} of them with another gold "
                f"answer"
            )
        before, behind = ([name for name in unasked if name.lower() in known] for known in (CONTEXTS, OPTIONS))
        if before or behind:
            places = "\\n".join(f"{{{name}}}" for name in [*before, asked, *behind])
            found.append(
                f"columns that are not asked: {', '.join(before + behind)}; where they belong to the question, set "
                f'question_template, such as "{places}"'
            )
        return found


def _kind(gold: str) -> Reading | None:
    for reading, mark in MARKS.items():
        if mark.search(gold):
            return reading
    is_prose = "\n" in gold.strip() or len(_WORD.findall(gold)) > MOST_WORDS or len(gold) > MAX_ANSWER_CHARS
    return "last_number" if is_prose else None
