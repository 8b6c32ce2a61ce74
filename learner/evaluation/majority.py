"""Votes on the answers to a problem: equal ones vote for the first of them."""

from collections.abc import Sequence

import msgspec

from prefixrl.common.evaluation.accuracy import EvaluatedRow
from prefixrl.common.evaluation.equality import first_equals


def with_votes(rows: Sequence[EvaluatedRow], timeout_s: int) -> list[EvaluatedRow]:
    """Return the rows with their votes; a text that stands alone is its own."""
    texts: dict[str, dict[str, str]] = {}
    for row in rows:
        if text := row.extracted.strip():
            texts.setdefault(row.prompt_id, {}).setdefault(text, text)
    several = {name: list(found) for name, found in texts.items() if len(found) > 1}
    if several:
        for (name, answers), firsts in zip(
            several.items(), first_equals(list(several.values()), timeout_s), strict=True
        ):
            texts[name] = {
                text: answers[first] for text, first in zip(answers, firsts, strict=True)
            }
    return [
        msgspec.structs.replace(row, vote=texts[row.prompt_id][row.extracted.strip()])
        if row.extracted.strip()
        else row
        for row in rows
    ]
