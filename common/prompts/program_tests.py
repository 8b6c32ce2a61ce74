"""The tests in the gold answer of a coding task, in the shapes that data sets write them. Pure.

{"inputs": [...], "outputs": [...], "fn_name": "add"}    also with singular keys, and as JSON within JSON
[{"input": "1 2", "output": "3"}, ...]                   one object per test
["assert add(1, 2) == 3", ...]                           also as one text
{"assert_case": [...]}                                   any of these under one of the keys WITHIN
"""

import ast
import json
from typing import Any, NamedTuple

WITHIN = ("assert_case", "test_list", "asserts", "functional", "tests")
MOST_BYTES = 900_000
"""Longest gold answer: with a program it must fit the pipe to the process that runs it."""


class Test(NamedTuple):
    """One run of a program."""

    given: Any
    """Text or lines for stdin; for a function its arguments: a list, an object of named ones, or lines of JSON."""
    expected: Any
    function: str | None
    """Function or `Class.method` to call; without it stdout is compared."""


def read_tests(gold: str) -> list[Test]:
    """Read the tests in a gold answer; raises ValueError with the remedy when there are none."""
    try:
        if len(gold.encode()) > MOST_BYTES:
            raise ValueError(f"{len(gold.encode())} bytes, at most {MOST_BYTES}: leave out some tests")
        if found := _tests(gold):
            return found
        raise ValueError("0 of them")
    except (ValueError, SyntaxError, RecursionError) as error:
        shapes = "JSON with inputs and outputs, a list of objects with input and output, or asserts such as f(1) == 2"
        raise ValueError(f"the gold answer holds no tests ({error}); expected {shapes}") from None


def _tests(found: Any) -> list[Test]:
    if isinstance(found, str):
        if not found.lstrip().startswith(("assert ", "import ", "from ")):
            return _tests(json.loads(found))
        # Each assert is read as a call and its value, so that the value stays outside of the sandbox.
        statements = ast.parse(found.strip()).body
        return [_of_assert(each) for each in statements if not isinstance(each, ast.Import | ast.ImportFrom)]
    if isinstance(found, list):
        return [test for each in found for test in _tests(each)]
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.60} where there should be an object of them")
    for keys in (("inputs", "outputs"), ("input", "output")):
        if keys[0] in found and keys[1] in found:
            return _of_table(found, *(found[key] for key in keys))
    if inner := next((found[key] for key in WITHIN if found.get(key)), None):
        return _tests(inner)
    raise ValueError(f"an object with the keys {', '.join(map(str, found)):.60}")


def _of_table(table: dict[str, Any], inputs: Any, outputs: Any) -> list[Test]:
    name, is_plural = table.get("fn_name") or None, "inputs" in table
    if name is None and table.get("testtype") == "functional":
        raise ValueError("a function to call without its fn_name")
    if not is_plural and (name or not (isinstance(inputs, list) and isinstance(outputs, list))):
        inputs, outputs = [inputs], [outputs]
    kinds = (str, list, dict) if name else (str, list, int, float)
    if strange := [each for each in (inputs if name else [*inputs, *outputs]) if not isinstance(each, kinds)]:
        what = "arguments as a list, an object or lines of JSON" if name else "text, a list of lines or a number"
        raise ValueError(f"{strange[0]!r:.40} where there should be {what}")
    return [Test(*each, name) for each in zip(inputs, outputs, strict=True)]


def _of_assert(statement: ast.stmt) -> Test:
    call: ast.expr | None = statement.test if isinstance(statement, ast.Assert) else None
    expected: ast.expr = ast.Constant(value=True)
    if isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
        call, expected = call.operand, ast.Constant(value=False)
    elif isinstance(call, ast.Compare) and len(call.ops) == 1 and isinstance(call.ops[0], ast.Eq | ast.Is):
        sides = call.left, call.comparators[0]
        call, expected = sides[::-1] if isinstance(sides[1], ast.Call) else sides
    try:
        if not isinstance(call, ast.Call) or (call.args and call.keywords):
            raise ValueError("no call")
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        given = named or [ast.literal_eval(each) for each in call.args]
        written = json.dumps(ast.literal_eval(expected), default=lambda each: sorted(each, key=repr))
        return Test(given, json.loads(written), ast.unparse(call.func).replace("()", ""))
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(statement)!r:.60} compares no call with a literal value") from None
