"""Programs in answers: find one, run it, compare its result. Blocks: for child processes.

    answers   the answer is the value of the last `<llm-code>` block, or of the function a text defines (TinyGSM)
    tests     the gold answer holds inputs and outputs (PRIME's coding tasks); the reward is the share of tests passed

Expected outputs never enter the sandbox. A fault of the program is a wrong answer; a `SandboxError` is no verdict.
"""

import json
import re
from textwrap import dedent
from typing import Any, NamedTuple

from prefixrl.common.prompts.extract import THINK_CLOSE
from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.comparison import is_printed, is_returned
from prefixrl.scorer.sandbox.runner import ProgramLimits, ProgramRun, run

MAX_TESTS = 10
MAX_PROGRAM_CHARS = 65_536

_BLOCK = re.compile(r"<llm-code>(.*?)</llm-code>", re.DOTALL)
_FENCE = re.compile(
    r"^(?:[ \t>]*|.*(?=`{3}py))(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[\w+#.-]*)[^`\n]*\n(?P<code>(?s:.*?))"
    r"(?:(?P=fence)[`~]*[ \t]*$|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
"""As CommonMark has them, indented or of tildes; one may end behind the code, and begin behind words for Python."""
_PYTHON = ("python", "py", "python3", "py3")
_FUNCTION = re.compile(r"^def +\w+ *\(", re.MULTILINE)


class Test(NamedTuple):
    """One run of a program."""

    given: Any
    """Text or lines for stdin; for a function its arguments: a list, an object of named ones, or lines of JSON."""
    expected: Any
    function: str | None
    """Function or `Class.method` to call; without it stdout is compared."""


def read_tests(gold: str) -> list[Test]:
    """Read the tests in a gold answer; raises ValueError when there are none."""
    try:
        if found := _tests(json.loads(gold)):
            return found
        raise ValueError("0 of them")
    except (ValueError, RecursionError) as error:
        shapes = "JSON with inputs and outputs, or a list of objects with input and output"
        raise ValueError(f"the gold answer holds no tests ({error}); expected {shapes}") from None


def _tests(found: Any) -> list[Test]:
    if isinstance(found, str):
        return _tests(json.loads(found))
    if isinstance(found, list):
        return [test for each in found for test in _tests(each)]
    keys = found.keys() if isinstance(found, dict) else set()
    if not ({"inputs", "outputs"} <= keys or {"input", "output"} <= keys):
        raise ValueError(f"{found!r:.60} where there should be an object of them")
    name, is_plural = found.get("fn_name") or None, "inputs" in found
    if name is None and found.get("testtype") == "functional":
        raise ValueError("a function to call without its fn_name")
    inputs, outputs = (found[each] for each in (("inputs", "outputs") if is_plural else ("input", "output")))
    if not is_plural and (name or not (isinstance(inputs, list) and isinstance(outputs, list))):
        inputs, outputs = [inputs], [outputs]
    kinds = (str, list, dict) if name else (str, list, int, float)
    if strange := [each for each in (inputs if name else [*inputs, *outputs]) if not isinstance(each, kinds)]:
        what = "arguments as a list, an object or lines of JSON" if name else "text, a list of lines or a number"
        raise ValueError(f"{strange[0]!r:.40} where there should be {what}")
    return [Test(*each, name) for each in zip(inputs, outputs, strict=True)]


def find_program(text: str, mode: CodeMode) -> str | None:
    """Return the last `<llm-code>` block or fenced program, else a text that defines a function, or None.

    Of fences the last labelled as Python counts, without one the last that has no label.
    """
    tail = text.rpartition(THINK_CLOSE)[2].replace("\r\n", "\n")
    if blocks := _BLOCK.findall(tail):
        return str(blocks[-1])
    fences = list(_FENCE.finditer(tail)) if mode == "tests" else []
    labels = {each["label"].casefold() in _PYTHON for each in fences if each["label"].casefold() in (*_PYTHON, "")}
    for each in reversed(fences):
        if labels and (each["label"].casefold() in _PYTHON if True in labels else not each["label"]):
            return dedent(each["code"]).rstrip(" \t")
    found = None if fences else _FUNCTION.search(tail)
    return tail[found.start() :].partition("\n```")[0] if found else None


# --- what is run ----------------------------------------------------------------------------------

_VALUE = """
import ast, decimal
space = {"__name__": "__main__"}
tree = ast.parse(PROGRAM)
last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "program.py", "exec"), space)
value = eval(compile(ast.Expression(last), "program.py", "eval"), space) if last is not None else None
functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
if last is None and functions and isinstance(tree.body[-1], ast.FunctionDef):
    value = space[functions[-1].name]()
if value is not None:
    print()
    print(format(decimal.Decimal(repr(value)), "f") if isinstance(value, float) else value)
"""
_CALL = """
import json, os, sys
result = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "program"}
exec(USUAL, space)
known = dict(space)
exec(compile(PROGRAM, "program.py", "exec"), space)
own = {name: value for name, value in space.items() if known.get(name) is not value}
owner, _, name = NAME.rpartition(".")
owner = owner if owner in own else "Solution" if "Solution" in own else ""
function = getattr(own[owner](), name) if owner else own[name]
given = json.loads(ARGUMENTS)
result.write(json.dumps(function(**given) if isinstance(given, dict) else function(*given)))
result.close()
"""

USUAL = """
from typing import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, reduce
from math import ceil, floor, gcd, inf, log, pi, sqrt
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, permutations, product
"""
"""Names that a program may use without an import, as where such tasks come from."""
_MAIN = """
space = {"__name__": "__main__"}
exec(USUAL, space)
exec(compile(PROGRAM, "program.py", "exec"), space)
"""
_NAMED = re.compile(r"\b(?!from|import|typing)\w{2,}")


def value_of(program: str, limits: ProgramLimits) -> tuple[ProgramRun, str | None]:
    """Run a program; its value is that of its last line or function, else its last printed line."""
    finished = run(f"PROGRAM = {program!r}\n{_VALUE}", limits=limits)
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if line.strip()]
    is_done = finished.status == "exited" and finished.code == 0
    return finished, lines[-1].strip() if is_done and lines else None


def share_passed(program: str, tests: list[Test], limits: ProgramLimits) -> tuple[float, bool]:
    """Return the share of the first MAX_TESTS tests passed, and True if one ran out of time.

    The tests after that one count as failed.
    """
    tests, passed = tests[:MAX_TESTS], 0
    for test in tests:
        finished = _ask(program, test.given, test.function, limits)
        if finished.status == "timeout":
            return passed / len(tests), True
        if finished.status == "exited" and finished.code == 0:
            stdout = finished.stdout.decode(errors="replace")
            passed += is_returned(stdout, test.expected) if test.function else is_printed(stdout, test.expected)
    return passed / len(tests), False


def _ask(program: str, given: Any, function: str | None, limits: ProgramLimits) -> ProgramRun:
    if function is None:
        lines = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
        used = set(_NAMED.findall(program))
        usual = [line for line in USUAL.splitlines() if "typing" in line or used.intersection(_NAMED.findall(line))]
        source = f"PROGRAM, USUAL = {program!r}, {chr(10).join(usual)!r}\n{_MAIN}"
        return run(source, lines.encode(), limits)
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    head = f"PROGRAM, NAME, ARGUMENTS, USUAL = {program!r}, {function!r}, {json.dumps(arguments)!r}, {USUAL!r}\n"
    return run(head + _CALL, limits=limits)
