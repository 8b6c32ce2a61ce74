"""Programs in answers: find one, run it, compare its result. Blocks: for child processes.

    answers   the answer is the value of the last `<llm-code>` block, or of the function a text defines (TinyGSM)
    tests     the gold answer holds inputs and outputs (PRIME's coding tasks); the reward is the share of tests passed

Expected outputs never enter the sandbox. A fault of the program is a wrong answer; a `SandboxError` is no verdict.
"""

import json
import re
from typing import Any

import msgspec

from prefixrl.common.prompts.extract import THINK_CLOSE
from prefixrl.common.wire.messages.groups import CodeMode
from prefixrl.scorer.sandbox.comparison import is_printed, is_returned
from prefixrl.scorer.sandbox.runner import ProgramLimits, ProgramRun, run

MAX_TESTS = 10
MAX_PROGRAM_CHARS = 65_536

_BLOCK = re.compile(r"<llm-code>(.*?)</llm-code>", re.DOTALL)
_FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FUNCTION = re.compile(r"^def +\w+ *\(", re.MULTILINE)


class Tests(msgspec.Struct, frozen=True):
    """The gold answer of a coding task."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    fn_name: str | None = None
    """Function to call; without it a program reads inputs from stdin, and its stdout is compared."""

    def __post_init__(self) -> None:
        if not self.inputs or len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")
        texts = self.inputs if self.fn_name else (*self.inputs, *self.outputs)
        kinds = (str, list) if self.fn_name else (str, list, int, float)
        if strange := [each for each in texts if not isinstance(each, kinds)]:
            what = "arguments as a list, or as lines of JSON" if self.fn_name else "text, a list of lines or a number"
            raise ValueError(f"{strange[0]!r:.40} where there should be {what}")


def read_tests(gold: str) -> Tests:
    """Read the tests in a gold answer; raises ValueError when there are none."""
    try:
        return msgspec.json.decode(gold, type=Tests)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"the gold answer holds no tests ({error}); expected JSON with inputs and outputs") from None


def find_program(text: str, mode: CodeMode) -> str | None:
    """Return the last `<llm-code>` block or fence, else a text that defines a function, or None."""
    tail = text.rpartition(THINK_CLOSE)[2]
    blocks = _BLOCK.findall(tail) or (_FENCE.findall(tail) if mode == "tests" else [])
    if blocks:
        return str(blocks[-1])
    found = _FUNCTION.search(tail)
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
function = getattr(own["Solution"](), NAME) if "Solution" in own else own[NAME]
result.write(json.dumps(function(*json.loads(ARGUMENTS))))
result.close()
"""

USUAL = """
from typing import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, permutations, product
"""
"""Names that a function to be called may use without an import, as where such tasks come from."""


def value_of(program: str, limits: ProgramLimits) -> tuple[ProgramRun, str | None]:
    """Run a program; its value is that of its last line or function, else its last printed line."""
    finished = run(f"PROGRAM = {program!r}\n{_VALUE}", limits=limits)
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if line.strip()]
    is_done = finished.status == "exited" and finished.code == 0
    return finished, lines[-1].strip() if is_done and lines else None


def share_passed(program: str, tests: Tests, limits: ProgramLimits) -> tuple[float, bool]:
    """Return the share of the first MAX_TESTS tests passed, and True if one ran out of time.

    The tests after that one count as failed.
    """
    inputs, outputs = tests.inputs[:MAX_TESTS], tests.outputs[:MAX_TESTS]
    passed = 0
    for given, expected in zip(inputs, outputs, strict=True):
        finished = _ask(program, given, tests.fn_name, limits)
        if finished.status == "timeout":
            return passed / len(inputs), True
        if finished.status == "exited" and finished.code == 0:
            stdout = finished.stdout.decode(errors="replace")
            passed += is_returned(stdout, expected) if tests.fn_name else is_printed(stdout, expected)
    return passed / len(inputs), False


def _ask(program: str, given: Any, function: str | None, limits: ProgramLimits) -> ProgramRun:
    if function is None:
        lines = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
        return run(program, lines.encode(), limits)
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    head = f"PROGRAM, NAME, ARGUMENTS, USUAL = {program!r}, {function!r}, {json.dumps(arguments)!r}, {USUAL!r}\n"
    return run(head + _CALL, limits=limits)
