"""Hostile programs as a scorer judges them, by root and by an ordinary user: none escapes, each has a verdict."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import hostile_programs
from benchmarks.hostile_programs import HOSTILE, TIMEOUT_S
from support.paths import ROOT

BUSY_S = 10.0
"""Additional time on a machine that does other work; `python -m benchmarks.sandbox` measures the true one."""
WATCHED = "from benchmarks import hostile_programs; hostile_programs.main()"


def as_this_user(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(params=["this user", "an ordinary user"])
def run_code(request: pytest.FixtureRequest) -> Callable[[str], str]:
    result: Callable[[str], str] = as_this_user
    return result if request.param == "this user" else request.getfixturevalue("as_ordinary_user")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_program_has_a_verdict_in_time_none_escapes_and_nothing_is_left(
    run_code: Callable[[str], str],
) -> None:
    assert len(HOSTILE) >= 60
    *judged, left = map(json.loads, run_code(WATCHED).splitlines())
    actual: dict[str, dict[str, Any]] = {each["name"]: each for each in judged}
    assert actual.keys() == HOSTILE.keys()
    assert [
        each for each in judged if each["outcome"] not in ("wrong", "parse_fail", "timeout")
    ] == []
    assert [
        each for each in judged if each["took_s"] > TIMEOUT_S + hostile_programs.ALLOWED_S + BUSY_S
    ] == []
    assert (left["processes"], left["descriptors"]) == (0, 0)


def test_a_program_that_does_escape_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOSTILE, "no attack", "print('ESCAPED')")
    (actual,) = hostile_programs.judged(["no attack"])
    assert actual["outcome"] == "right"
