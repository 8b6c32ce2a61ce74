"""Programs in answers: find one, run it, compare its result. Blocks: for child processes.

    answers   the answer is the value of the last `<llm-code>` block, or of the function a text defines (TinyGSM)
    tests     the gold answer holds inputs and outputs (PRIME's coding tasks); the reward is the share of tests passed

Expected outputs never enter the sandbox. A fault of the program is a wrong answer; a `SandboxError`
is no verdict.
"""

import builtins
import re
from functools import cache
from importlib import import_module
from pathlib import Path
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
    r"^(?:(?P<before>[ \t>]*)|.*(?=(?:`{3}|~{3})py))(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[\w+#.-]*)[^`\n]*\n"
    r"(?P<code>(?s:.*?))(?:(?P=fence)[`~]*[ \t]*$|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
"""As CommonMark has them, indented or of tildes; one may end behind the code, and begin behind words for Python."""
_PYTHON = re.compile(r"(?:i?python|pypy|py)[\d.]*", re.IGNORECASE)
_QUOTED = re.compile(r"^[ \t]*(?:> ?)+", re.MULTILINE)
_FUNCTION = re.compile(r"^def +\w+ *\(", re.MULTILINE)


def find_program(text: str, mode: CodeMode) -> str | None:
    """Return the last `<llm-code>` block or fenced program, else a text that defines a function, or None.

    Of fences the last labelled as Python counts, without one the last that has no label.
    """
    tail = text.rpartition(THINK_CLOSE)[2].replace("\r\n", "\n").replace("\r", "\n")
    if blocks := _BLOCK.findall(tail):
        return str(blocks[-1])
    fences = list(_FENCE.finditer(tail)) if mode == "tests" else []
    labelled = [fence for fence in fences if _PYTHON.fullmatch(fence["label"])]
    candidates = labelled or [fence for fence in fences if not fence["label"]]
    if candidates:
        fence = candidates[-1]
        is_quoted = ">" in (fence["before"] or "")
        code = _QUOTED.sub("", fence["code"]) if is_quoted else fence["code"]
        return dedent(code).rstrip(" \t")
    function = None if fences else _FUNCTION.search(tail)
    return tail[function.start() :].partition("\n```")[0] if function else None


MODULES = [
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "typing",
    "time",
    "fractions",
]
"""Modules whose names, and which themselves, a program may use without an import, as in PRIME's and verl's judges."""
_DRIVERS = Path(__file__).with_name("drivers.py").read_text(encoding="utf-8")
_WORD = re.compile(r"\w+")


@cache
def _imports_by_name() -> dict[str, str]:
    """Return the statement that imports each name, as if all were imported in this order."""
    imports = {"np": "import numpy as np"}
    for module in map(import_module, MODULES):
        names = getattr(module, "__all__", None) or (
            name for name in vars(module) if name[0] != "_"
        )
        imports |= {
            name: f"from {module.__name__} import {name}"
            for name in names
            if not hasattr(builtins, name)
        }
    return imports | {name: f"import {name}" for name in MODULES}


def value_of(
    program: str, limits: ProgramLimits, packages: tuple[str, ...]
) -> tuple[ProgramRun, str | None]:
    """Run a program; return the value of its last line or function, else its last printed line."""
    finished = run(_driver("print_value", program, packages), b"", limits, packages)
    lines = [line for line in finished.stdout.decode(errors="replace").splitlines() if line.strip()]
    has_succeeded = finished.status == "exited" and finished.code == 0
    return finished, lines[-1].strip() if has_succeeded and lines else None


def share_passed(
    program: str,
    tests: list[Test],
    limits: ProgramLimits,
    packages: tuple[str, ...],
    tolerance: float,
) -> tuple[float, bool]:
    """Return the share of the first MAX_TESTS tests passed, and True if one ran out of time.

    The tests after that one count as failed.
    """
    tests = tests[:MAX_TESTS]
    passed = 0
    for test in tests:
        finished = _run_test(program, test, limits, packages)
        if finished.status == "timeout":
            return passed / len(tests), True
        if finished.status == "exited" and finished.code == 0:
            is_right = is_returned if test.function else is_printed
            passed += is_right(finished.stdout.decode(errors="replace"), test.expected, tolerance)
    return passed / len(tests), False


def _run_test(
    program: str, test: Test, limits: ProgramLimits, packages: tuple[str, ...]
) -> ProgramRun:
    if test.function is None:
        lines = test.inputs if isinstance(test.inputs, list) else [test.inputs]
        stdin = "\n".join(map(str, lines)).encode()
        return run(_driver("run_script", program, packages), stdin, limits, packages)
    source = _driver("print_result", program, packages, test.function, test.inputs)
    return run(source, b"", limits, packages)


def _driver(name: str, program: str, packages: tuple[str, ...], *arguments: object) -> str:
    """Return the source that calls one of the functions of `drivers.py` on a program."""
    # The import of all names takes a quarter of the time of a short program.
    words = set(_WORD.findall(program))
    if "numpy" not in packages:
        words.discard("np")
    # This process may have given a module a name that the sandbox lacks.
    usual = "\n".join(
        f"try: {_imports_by_name()[word]}\nexcept ImportError: pass"
        for word in sorted(words & _imports_by_name().keys())
    )
    call = f"{name}({', '.join(map(repr, (program, usual, *arguments)))})"
    return f"{_DRIVERS}\n\ninf, nan = float('inf'), float('nan')\n{call}\n"
