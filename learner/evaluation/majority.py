"""Votes on the answers to a problem: equal ones vote for the first of them."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from prefixrl.common.evaluation.accuracy import EvaluatedRow

log = logging.getLogger(__name__)


def with_votes(rows: Sequence[EvaluatedRow], timeout_s: int) -> list[EvaluatedRow]:
    """Return the rows with their votes; a text that stands alone is its own."""
    texts: dict[str, dict[str, str]] = {}
    for row in rows:
        if text := row.extracted.strip():
            texts.setdefault(row.prompt_id, {}).setdefault(text, text)
    several = {name: list(found) for name, found in texts.items() if len(found) > 1}
    if several:
        for (name, answers), firsts in zip(
            several.items(), _compared(list(several.values()), timeout_s), strict=True
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


def _compared(problems: list[list[str]], timeout_s: int) -> list[list[int]]:
    """Ask a process that imports the verifier; where it fails, answers are compared as text."""
    called = ["prefixrl.scorer.verifier.offline", "equalities", str(os.getpid()), str(timeout_s)]
    command = [sys.executable, "-P", "-m", *called]
    process = subprocess.run(
        command, input=msgspec.json.encode(problems), stdout=subprocess.PIPE, check=False
    )
    if process.returncode != 0:
        log.warning(
            "answers are compared as text, the process that compares them ended with %d",
            process.returncode,
        )
        return [list(range(len(each))) for each in problems]
    return msgspec.json.decode(process.stdout, type=list[list[int]])
