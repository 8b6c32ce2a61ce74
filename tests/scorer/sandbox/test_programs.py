"""Programs in answers, found, run in the sandbox and judged by the pool as in a run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.comparison import is_returned
from prefixrl.scorer.sandbox.programs import find_program, read_tests
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement

PATIENCE_S = 200
ADD = json.dumps({"inputs": ["1 2\n", "10 -3\n", "0 0\n"], "outputs": ["3\n", "7\n", "0\n"]})
CALL = json.dumps({"inputs": [[1, 2], [10, -3]], "outputs": [[3], [7]], "fn_name": "add"})
LINES = json.dumps({"inputs": ["[1,2]\n3"], "outputs": ["[1, 2, 3]"], "fn_name": "add"})
READS = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def block(program: str) -> str:
    return f"I compute it. <llm-code>\n{program}\n</llm-code> So."


POOLS: dict[int, VerifierPool] = {}
"""One pool for every time limit: its child imports sympy once."""


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    yield
    for pool in POOLS.values():
        pool.close()
    POOLS.clear()


def judged(code: CodeMode, *asked: tuple[str, str], timeout_s: int = 5) -> list[Judgement]:
    """Texts and golds."""
    pool = POOLS[timeout_s] if timeout_s in POOLS else VerifierPool(1, timeout_s, runs_programs=True)
    POOLS[timeout_s] = pool
    for key, (text, gold) in enumerate(asked):
        pool.submit(key, text, gold, code=code)
    found: dict[int, Judgement] = {}
    deadline = time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        found |= dict(pool.poll())
    return [found[key] for key in range(len(asked))]


def test_the_last_block_or_fence_after_the_thinking_is_the_program() -> None:
    assert find_program(block("1") + block("2"), "answers") == "\n2\n"
    assert find_program(fenced("1") + "\n" + fenced("2"), "tests") == "2\n"
    assert find_program("<think>" + fenced("1") + "</think> none", "tests") is None
    assert find_program(fenced("1"), "answers") is None
    assert find_program("f is defined as\ndef f():\n    return 3", "answers") == "def f():\n    return 3"


def test_a_word_that_begins_with_def_is_no_program() -> None:
    assert find_program("the sequence defined by (a) is\ndefinitely 7", "answers") is None


NO_TESTS = (
    "7",
    '{"inputs": [], "outputs": []}',
    '{"inputs": ["1"], "outputs": []}',
    '{"inputs": ["1"], "outputs": [null]}',
    '{"inputs": [{"a": 1}], "outputs": ["1"]}',
    '{"inputs": [3], "outputs": [3], "fn_name": "f"}',
)


@pytest.mark.parametrize("gold", NO_TESTS)
def test_a_gold_answer_without_tests_is_told(gold: str) -> None:
    with pytest.raises(ValueError, match="holds no tests"):
        read_tests(gold)


def test_the_value_of_a_program_is_the_answer() -> None:
    found = judged(
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
    assert [(each.reward, each.status) for each in found] == [
        (1.0, "ok"), (1.0, "ok"), (0.0, "ok"), (1.0, "ok"), (1.0, "ok"), (1.0, "ok"), (1.0, "ok"), (1.0, "ok"),
        (0.0, "ok"), (1.0, "ok"), (0.0, "ok"), (0.0, "ok"),
    ]  # fmt: skip
    assert [each.extracted for each in found[:4]] == ["18", "18", "21", "0.30000000000000004"]


def test_a_program_without_a_value_is_no_answer_of_any_kind() -> None:
    found = judged(
        "answers",
        (block("1 / 0"), "0"),
        (block("import os; os._exit(0)"), "0"),
        (block("this is no Python"), "0"),
        (block("x" * 70_000), "0"),
        timeout_s=30,
    )
    assert [(each.reward, each.status) for each in found] == [(0.0, "parse_fail")] * 4
    (endless,) = judged("answers", (block("while True: pass"), "0"), timeout_s=1)
    assert (endless.reward, endless.status) == (0.0, "timeout")


def test_the_share_of_tests_passed_is_the_reward() -> None:
    found = judged(
        "tests",
        (fenced(READS), ADD),
        (fenced("print(3)"), ADD),
        (fenced("a, b = map(int, input().split())\nprint(float(a + b))"), ADD),
        (fenced("raise SystemExit(1)"), ADD),
        (fenced("print('PASS')\nprint('3\\n7\\n0')"), ADD),
        (fenced("def add(a, b):\n    print('noise')\n    return a + b"), CALL),
        (fenced("class Solution:\n    def add(self, a, b):\n        return [*a, b]"), LINES),
        (fenced("def add(a, b):\n    return 3"), CALL),
        ("I do not know", ADD),
        (fenced("while True: pass"), ADD),
        timeout_s=2,
    )
    assert [(each.reward, each.status) for each in found] == [
        (1.0, "ok"), (pytest.approx(1 / 3), "ok"), (1.0, "ok"), (0.0, "ok"), (0.0, "ok"), (1.0, "ok"), (1.0, "ok"),
        (0.5, "ok"), (0.0, "no_answer"), (0.0, "timeout"),
    ]  # fmt: skip


def called(given: object, expected: object) -> str:
    return json.dumps({"inputs": [given], "outputs": [expected], "fn_name": "f"})


def test_a_function_is_called_as_its_tests_are_written() -> None:
    method = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return Counter(x)[1]"
    numbers = json.dumps({"inputs": [3], "outputs": [4]})
    found = judged(
        "tests",
        (fenced(method), called([[1, 2, 1]], 2)),
        (fenced("print(int(input()) + 1)"), numbers),
        (fenced("def f(x):\n    return x"), called('""', "")),
        (fenced("def f(x):\n    return x"), called('"[abc"', "[abc")),
        (fenced("def f(x):\n    return x"), called("true", "true")),
        (fenced("def g(x):\n    return x"), called([1], 1)),
        (fenced("pass"), json.dumps({"inputs": [[[2, 3]]], "outputs": [[2, 3]], "fn_name": "List"})),
    )
    assert [(each.reward, each.status) for each in found] == [(1.0, "ok")] * 5 + [(0.0, "ok")] * 2


def test_only_ten_tests_are_run() -> None:
    many = json.dumps({"inputs": [str(n) for n in range(12)], "outputs": ["x"] * 10 + ["y"] * 2})
    (found,) = judged("tests", (fenced("print('x')"), many))
    assert found.reward == 1.0


def test_a_program_cannot_see_what_is_expected() -> None:
    looks = (
        "import sys, gc\nprint([each for each in gc.get_objects() if isinstance(each, str) and 'secret' in each][:1])"
    )
    gold = json.dumps({"inputs": ["1"], "outputs": ["secret"]})
    (found,) = judged("tests", (fenced(looks), gold))
    assert found.reward == 0.0


def test_a_gold_answer_without_tests_is_an_error_and_never_a_wrong_answer() -> None:
    (found,) = judged("tests", (fenced(READS), "18"))
    assert found.status == "error"
    assert found.extracted is not None and "holds no tests" in found.extracted


def test_nothing_is_run_where_the_data_does_not_ask_for_it() -> None:
    found = judged("none", (block("18"), "18"), (r"\boxed{18} " + block("1/0"), "18"))
    assert [each.status for each in found] == ["no_answer", "ok"]


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
