"""Programs in answers: find one, run it, compare its result. Blocks: for child processes.

    answers   the answer is the value of the last `<llm-code>` block, or of the function a text defines (TinyGSM)
    tests     the gold answer holds inputs and outputs (PRIME's coding tasks); the reward is the share of tests passed

Expected outputs never enter the sandbox. A fault of the program is a wrong answer; a `SandboxError` is no verdict.
"""

import json
import math
import re
from typing import Any

import msgspec

from prefixrl.common.engines.extract import THINK_CLOSE
from prefixrl.common.wire.messages import CodeMode
from prefixrl.scorer.sandbox.runner import ProgramLimits, ProgramRun, run

MAX_TESTS = 10
MAX_PROGRAM_CHARS = 65_536
RELATIVE = 1e-9

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
exec(compile(PROGRAM, "program.py", "exec"), space)
function = getattr(space["Solution"](), NAME) if "Solution" in space else space[NAME]
result.write(json.dumps(function(*json.loads(ARGUMENTS))))
result.close()
"""


def value_of(program: str, limits: ProgramLimits) -> tuple[ProgramRun, str | None]:
    """Run a program; its value is that of its last line or function, else its last printed line."""
    finished = run(f"PROGRAM = {program!r}\n{_VALUE}", limits=limits)
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if line.strip()]
    is_done = finished.status == "exited" and finished.code == 0
    return finished, lines[-1].strip() if is_done and lines else None


def is_value(gold: str, value: str) -> bool:
    """Return True if a program's number is the gold answer, up to the rounding of floats."""
    try:
        want, got = float(gold.replace(",", "").strip("$ ")), float(value)
    except ValueError:
        return False
    return math.isclose(want, got, rel_tol=RELATIVE, abs_tol=1e-12)


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
            passed += _returned(stdout, expected) if tests.fn_name else _printed(stdout, expected)
    return passed / len(inputs), False


def _ask(program: str, given: Any, function: str | None, limits: ProgramLimits) -> ProgramRun:
    if function is None:
        lines = given if isinstance(given, str) else "\n".join(map(str, given))
        return run(program, lines.encode(), limits)
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    head = f"PROGRAM, NAME, ARGUMENTS = {program!r}, {function!r}, {json.dumps(arguments)!r}\n"
    return run(head + _CALL, limits=limits)


def _printed(stdout: str, expected: Any) -> bool:
    """Return True if equal line by line, or word by word up to the rounding of numbers."""
    wanted = expected if isinstance(expected, str) else "\n".join(map(str, expected))
    got, want = ([line.strip() for line in text.strip().splitlines()] for text in (stdout, wanted))
    if got == want:
        return True
    words = list(zip(" ".join(got).split(), " ".join(want).split(), strict=False))
    is_as_long = len(" ".join(got).split()) == len(" ".join(want).split())
    return len(got) == len(want) and is_as_long and all(a == b or is_value(b, a) for a, b in words)


def _returned(stdout: str, expected: Any) -> bool:
    wanted = json.loads(expected) if isinstance(expected, str) and expected[:1] in '[{"' else expected
    try:
        got = json.loads(stdout)
        # Some sets wrap each output in a list of one.
        return bool(got == wanted or [got] == wanted or str(got) == wanted)
    except (ValueError, RecursionError):  # a program may print brackets within brackets without end
        return False
