"""Doubts about a source that can be read: golds that no answer meets, repeated questions, other counts. Pure."""

import re
from collections.abc import Sequence

from prefixrl.common.config.data import Reading, Source
from prefixrl.common.config.foreign.verifier import WITH_MATHEMATICAL_GOLD
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS
from prefixrl.learner.data.columns import beginning_of
from prefixrl.learner.data.rows import MARKS, Layout, Problem, text_of

MOST_WORDS = 12
CONTEXTS, OPTIONS = (
    frozenset({"body", "input", "context", "passage"}),
    frozenset({"options", "choices"}),
)
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


def doubts(
    problems: Sequence[Problem], source: Source, shape: Layout, columns: Sequence[str]
) -> list[str]:
    """Return a warning per doubt about the problems of one source; `columns` are those that say something."""
    questions: dict[str, str] = {}
    # The first gold of a question stands for it: every later one that differs contradicts it.
    contradictions = sum(
        questions.setdefault(plain(text_of(each)), each.gold) != each.gold for each in problems
    )
    golds = [
        each.gold
        for each in problems
        if each.code in WITH_MATHEMATICAL_GOLD and shape.reading != "as_it_is"
    ]
    warnings = _about_golds(golds)
    if source.published not in (None, len(problems)):
        warnings.append(
            f"{len(problems)} problems, {source.published} are published: other files, or bad rows?"
        )
    if repeated := len(problems) - len(questions):
        warnings.append(
            f"{repeated} problems repeat a question, {contradictions} of them with another gold answer"
        )
    unasked = [name for name in columns if name not in shape.columns]
    # Told by the names of columns: a context is read before the question, options after it.
    before, behind = (
        [name for name in unasked if name.lower() in known] for known in (CONTEXTS, OPTIONS)
    )
    if before or behind:
        places = "\\n".join(f"{{{name}}}" for name in [*before, shape.question[0][0], *behind])
        warnings.append(
            f"columns that are not asked: {', '.join(before + behind)}; where they belong to the question, set "
            f'question_template, such as "{places}"'
        )
    return warnings


def _about_golds(golds: list[str]) -> list[str]:
    kinds = grouped((kind, gold) for gold in golds if (kind := _kind(gold)))
    return [
        f"{len(these)} of {len(golds)} gold answers {_KINDS[kind]}, for example {beginning_of(these[0])}: an answer "
        f'hardly equals one; set answer_reading = "{kind}", or "as_it_is" where they are meant so'
        for kind, these in kinds.items()
    ]


def _kind(gold: str) -> Reading | None:
    for reading, mark in MARKS.items():
        if mark.search(gold):
            return reading
    is_prose = (
        "\n" in gold.strip()
        or len(_WORD.findall(gold)) > MOST_WORDS
        or len(gold) > MAX_ANSWER_CHARS
    )
    return "last_number" if is_prose else None
