"""Programs in answers: find one, run it, compare its result. Blocks: for child processes.

    answers   the answer is the value of the last `<llm-code>` block, or of the function a text defines (TinyGSM)
    tests     the gold answer holds inputs and outputs (PRIME's coding tasks); the reward is the share of tests passed

Expected outputs never enter the sandbox. A fault of the program is a wrong answer; a `SandboxError` is no verdict.
"""

import json
import re
from textwrap import dedent

from prefixrl.common.prompts.extract import THINK_CLOSE
from prefixrl.common.prompts.program_tests import Test
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


def find_program(text: str, mode: CodeMode) -> str | None:
    """Return the last `<llm-code>` block or fenced program, else a text that defines a function, or None.

    Of fences the last labelled as Python counts, without one the last that has no label.
    """
    tail = text.rpartition(THINK_CLOSE)[2].replace("\r\n", "\n")
    if blocks := _BLOCK.findall(tail):
        return str(blocks[-1])
    fences = list(_FENCE.finditer(tail)) if mode == "tests" else []
    labelled = [each for each in fences if each["label"].casefold() in _PYTHON]
    if named := labelled or [each for each in fences if not each["label"]]:
        return dedent(named[-1]["code"]).rstrip(" \t")
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
value = function(**GIVEN) if isinstance(GIVEN, dict) else function(*GIVEN)
result.write(json.dumps(value, default=lambda each: sorted(each, key=repr)))
result.close()
"""
_MAIN = """
space = {"__name__": "__main__"}
exec(USUAL, space)
exec(compile(PROGRAM, "program.py", "exec"), space)
"""

USUAL = """
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Set, Tuple, Union
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, reduce
from math import ceil, floor, gcd, inf, log, pi, sqrt
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, permutations, product
"""
"""Names that a program may use without an import, as where such tasks come from."""
_WORD = re.compile(r"\w+")
_USUAL_NAMES = frozenset(_WORD.findall(USUAL)) - {"from", "import"}


def value_of(program: str, limits: ProgramLimits, packages: tuple[str, ...]) -> tuple[ProgramRun, str | None]:
    """Run a program; its value is that of its last line or function, else its last printed line."""
    finished = run(f"PROGRAM = {program!r}\n{_VALUE}", b"", limits, packages)
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if line.strip()]
    is_done = finished.status == "exited" and finished.code == 0
    return finished, lines[-1].strip() if is_done and lines else None


def share_passed(
    program: str, tests: list[Test], limits: ProgramLimits, packages: tuple[str, ...], tolerance: float
) -> tuple[float, bool]:
    """Return the share of the first MAX_TESTS tests passed, and True if one ran out of time.

    The tests after that one count as failed.
    """
    tests, passed = tests[:MAX_TESTS], 0
    for test in tests:
        finished = _ask(program, test, limits, packages)
        if finished.status == "timeout":
            return passed / len(tests), True
        if finished.status == "exited" and finished.code == 0:
            is_right = is_returned if test.function else is_printed
            passed += is_right(finished.stdout.decode(errors="replace"), test.expected, tolerance)
    return passed / len(tests), False


def _ask(program: str, test: Test, limits: ProgramLimits, packages: tuple[str, ...]) -> ProgramRun:
    # Their import takes a quarter of the time of a short program.
    usual = "" if _USUAL_NAMES.isdisjoint(_WORD.findall(program)) else USUAL
    head, given = f"PROGRAM, USUAL = {program!r}, {usual!r}\n", test.given
    if test.function is None:
        lines = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
        return run(head + _MAIN, lines.encode(), limits, packages)
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    head += f"inf, nan = float('inf'), float('nan')\nNAME, GIVEN = {test.function!r}, {arguments!r}\n"
    return run(head + _CALL, b"", limits, packages)
