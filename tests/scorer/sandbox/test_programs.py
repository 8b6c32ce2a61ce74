"""Programs in answers, found, run in the sandbox and judged by the pool as in a run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.comparison import is_returned
from prefixrl.scorer.sandbox.programs import find_program
from prefixrl.scorer.sandbox.runner import probe
from prefixrl.scorer.verifier.exchange import STANDARD, Choices
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

PATIENCE_S = 200
ADD = json.dumps({"inputs": ["1 2\n", "10 -3\n", "0 0\n"], "outputs": ["3\n", "7\n", "0\n"]})
READS = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def block(program: str) -> str:
    return f"I compute it. <llm-code>\n{program}\n</llm-code> So."


POOLS: dict[tuple[int, Choices], VerifierPool] = {}
"""One pool for every time limit and choices: its child imports sympy once."""


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    yield
    for pool in POOLS.values():
        pool.close()
    POOLS.clear()


def judged(
    code: CodeMode, *asked: tuple[str, str], timeout_s: int = 5, choices: Choices = STANDARD
) -> list[Judgement]:
    """Texts and golds."""
    key = timeout_s, choices
    pool = POOLS[key] if key in POOLS else VerifierPool(1, timeout_s, choices=choices)
    POOLS[key] = pool
    for number, (text, gold) in enumerate(asked):
        pool.submit(number, text, gold, code=code)
    results: dict[int, Judgement] = {}
    deadline = time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        results |= dict(pool.poll())
    return [results[number] for number in range(len(asked))]


def test_answers_are_found_in_tagged_blocks_alone_where_their_value_counts() -> None:
    assert find_program(block("1") + block("2"), "answers") == "\n2\n"
    assert find_program(fenced("1"), "answers") is None


def test_a_word_that_begins_with_def_is_no_program() -> None:
    assert find_program("the sequence defined by (a) is\ndefinitely 7", "answers") is None


ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()
]
"""Texts with the program that is found in them, or with tests and the verdict."""


def test_every_text_of_the_corpus_holds_the_program_that_it_should() -> None:
    texts = [row for row in ROWS if "program" in row]
    actual = [(row["text"], find_program(row["text"], "tests")) for row in texts]
    assert len(ROWS) >= 80 and actual == [(row["text"], row["program"]) for row in texts]


@pytest.mark.slow
def test_every_shape_of_tests_is_run_or_told_and_never_a_silent_zero() -> None:
    rows = [row for row in ROWS if "reward" in row]
    verdicts = judged("tests", *((row["text"], row["gold"]) for row in rows))
    wrong = [
        (row, each)
        for row, each in zip(rows, verdicts, strict=True)
        if (each.reward, each.status) != (row["reward"], row["status"])
    ]
    assert wrong == []
    assert all(
        "holds no tests" in (each.extracted or "") for each in verdicts if each.status == "error"
    )


def test_the_value_of_a_program_is_the_answer() -> None:
    verdicts = judged(
        "answers",
        (block("x = 3\nx * 6"), "18"),
        (block("x = 3\nprint(x * 6)"), "18"),
        (block("x = 3\nx * 7"), "18"),
        (block("0.1 + 0.2"), "0.3"),
        (block("from fractions import Fraction\nFraction(1, 2)"), r"\frac{1}{2}"),
        (block("'x + 1'"), "1+x"),
        ("def simple_math_problem() -> int:\n    eggs = 16\n    return eggs * 2 - 14\n", "18"),
        (r"no program: \boxed{18}", "18"),
        (r"a number defined by \boxed{17}", "18"),
        (block("1 / 3"), r"\frac{1}{3}"),
        (block("1000000000500"), "1000000000000"),
        (block("12"), "1,2"),
    )
    assert [(each.reward, each.status) for each in verdicts] == [
        (1.0, "ok"),
        (1.0, "ok"),
        (0.0, "ok"),
        (1.0, "ok"),
        (1.0, "ok"),
        (1.0, "ok"),
        (1.0, "ok"),
        (1.0, "ok"),
        (0.0, "ok"),
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "ok"),
    ]
    assert [each.extracted for each in verdicts[:4]] == ["18", "18", "21", "0.30000000000000004"]


@pytest.mark.slow
def test_a_program_without_a_value_is_no_answer_of_any_kind() -> None:
    verdicts = judged(
        "answers",
        (block("1 / 0"), "0"),
        (block("import os; os._exit(0)"), "0"),
        (block("this is no Python"), "0"),
        (block("x" * 70_000), "0"),
        timeout_s=30,
    )
    assert [(each.reward, each.status) for each in verdicts] == [(0.0, "parse_fail")] * 4
    for code, text, gold in (
        ("answers", block("while True: pass"), "0"),
        ("tests", fenced("while True: pass"), ADD),
    ):
        (endless,) = judged(code, (text, gold), timeout_s=1)
        assert (endless.reward, endless.status) == (0.0, "timeout")


@pytest.mark.slow
def test_a_user_may_allow_packages_and_other_digits() -> None:
    third = fenced("import numpy as np\nprint(np.array([1 / 3]).sum().round(7))")
    gold = json.dumps({"inputs": [""], "outputs": ["0.33333333333"]})
    choices = [Choices(False, digits, ("numpy",)) for digits in (1e-9, 1e-6)]
    actual = [judged("tests", (third, gold), timeout_s=20, choices=each)[0] for each in choices]
    assert [(each.reward, each.status) for each in actual] == [(0.0, "ok"), (1.0, "ok")]
    (value,) = judged(
        "answers", (block("0.3333333"), r"\frac{1}{3}"), timeout_s=20, choices=choices[1]
    )
    assert value.reward == 1.0
    assert "cannot import nope" in (probe(("nope",)) or "")


def test_nothing_is_run_where_the_data_does_not_ask_for_it() -> None:
    verdicts = judged("none", (block("18"), "18"), (r"\boxed{18} " + block("1/0"), "18"))
    assert [each.status for each in verdicts] == ["no_answer", "ok"]


REFUSED = f"""
import sys
sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
from test_programs import ADD, READS, fenced, judged
(found,) = judged("tests", (fenced(READS), ADD))
print(found.status, found.extracted)
"""


def test_a_sandbox_that_refuses_is_an_error_and_never_a_wrong_answer() -> None:
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable]
    finished = subprocess.run([*command, "-c", REFUSED], capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("error this host cannot isolate programs: ")


@pytest.mark.parametrize("depth", [900, 200_000])
def test_a_result_of_brackets_in_brackets_is_wrong_and_no_fault(depth: int) -> None:
    assert not is_returned("[" * depth, [1])
    assert not is_returned("[" * depth + "]" * depth, "1")
