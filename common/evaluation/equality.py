"""Equal answers to a problem, compared by the verifier in a process of its own."""

import logging
import os
import subprocess
import sys

import msgspec

log = logging.getLogger(__name__)

START_S = 120.0
"""Longest start of the process on a busy host."""


def first_equals(problems: list[list[str]], timeout_s: int) -> list[list[int]]:
    """Return for every answer to a problem the index of the first answer that equals it.

    Where the process fails, every text equals itself alone.

    Args:
        problems: the answers to each problem.
        timeout_s: the limit of one comparison.
    """
    called = ["prefixrl.scorer.verifier.offline", "equalities", str(os.getpid()), str(timeout_s)]
    command = [sys.executable, "-P", "-m", *called]
    # Every two answers are compared both ways.
    most_s = START_S + timeout_s * sum(len(answers) ** 2 for answers in problems)
    try:
        process = subprocess.run(
            command,
            input=msgspec.json.encode(problems),
            stdout=subprocess.PIPE,
            check=False,
            timeout=most_s,
        )
    except subprocess.TimeoutExpired:
        log.warning("answers are compared as text: their comparison took longer than %g s", most_s)
    else:
        if process.returncode == 0:
            return msgspec.json.decode(process.stdout, type=list[list[int]])
        log.warning(
            "answers are compared as text, the process that compares them ended with %d",
            process.returncode,
        )
    return [list(range(len(answers))) for answers in problems]
