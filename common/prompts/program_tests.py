"""The tests in the gold answer of a coding task, in the shapes that data sets write them. Pure.

{"inputs": [...], "outputs": [...], "fn_name": "add"}    also with singular keys, and as JSON within JSON
[{"input": "1 2", "output": "3"}, ...]                   one object per test
["assert add(1, 2) == 3", ...]                           also as one text
{"assert_case": [...]}                                   any of these under one of the keys WITHIN
"""

import ast
import json
import re
from textwrap import dedent
from typing import Any, NamedTuple

NAMED = ("fn_name", "function_name", "func_name", "entry_point")
WITHIN = ("assert_case", "test_list", "asserts", "functional", "tests")
MOST_BYTES = 900_000
"""Longest gold answer: with a program it must fit the pipe to the process that runs it."""


class Test(NamedTuple):
    """One run of a program."""

    inputs: Any
    """Text or lines for stdin; for a function its arguments: a list, or an object of named ones."""
    expected: Any
    function: str | None
    """Function or `Class.method` to call; without it stdout is compared."""


def read_tests(gold: str) -> list[Test]:
    """Read the tests in a gold answer; raises ValueError with the remedy when there are none."""
    try:
        if len(gold.encode()) > MOST_BYTES:
            raise ValueError(
                f"{len(gold.encode())} bytes, at most {MOST_BYTES}: leave out some tests"
            )
        if tests := _tests(gold):
            return tests
        raise ValueError("0 of them")
    except (ValueError, SyntaxError, RecursionError) as error:
        shapes = "JSON with inputs and outputs, a list of objects with input and output, or asserts such as f(1) == 2"
        raise ValueError(f"the gold answer holds no tests ({error}); expected {shapes}") from None


def _tests(document: Any, function: str | None = None) -> list[Test]:
    if isinstance(document, str):
        if not re.match(r"\s*(?:assert\b|import |from )", document):
            return _tests(json.loads(document), function)
        # Each assert is read as a call and its value, so that the value stays outside of the sandbox.
        statements = ast.parse(dedent(document).strip()).body
        return [
            _of_assert(each)
            for each in statements
            if not isinstance(each, ast.Import | ast.ImportFrom)
        ]
    if isinstance(document, list):
        return [test for each in document for test in _tests(each, function)]
    if not isinstance(document, dict):
        raise ValueError(f"{document!r:.60} where there should be an object of them")
    function = next((document[key] for key in NAMED if document.get(key)), function)
    for keys in (("inputs", "outputs"), ("input", "output")):
        if keys[0] in document and keys[1] in document:
            return _of_table(document, document[keys[0]], document[keys[1]], function)
    if inner := next((document[key] for key in WITHIN if document.get(key)), None):
        return _tests(inner, function)
    raise ValueError(f"an object with the keys {', '.join(map(str, document)):.60}")


def _of_table(table: dict[str, Any], inputs: Any, outputs: Any, name: str | None) -> list[Test]:
    if name is None and table.get("testtype") == "functional":
        raise ValueError("a function to call without its fn_name")
    # One test may stand without a list around it; the arguments of a function are a list anyway.
    if not (isinstance(inputs, list) and isinstance(outputs, list)) or (
        name and "inputs" not in table
    ):
        inputs = [inputs]
        outputs = [outputs]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return [
            Test(_arguments(given), expected, name)
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    if strange := [
        each for each in (*inputs, *outputs) if not isinstance(each, str | list | int | float)
    ]:
        raise ValueError(
            f"{strange[0]!r:.40} where there should be text, a list of lines or a number"
        )
    return [Test(*each, None) for each in zip(inputs, outputs, strict=True)]


def _arguments(value: Any) -> list[Any] | dict[str, Any]:
    """Return the arguments of a call; keys that are all whole numbers are such, which JSON can only write as text."""
    if isinstance(value, dict) and all(map(str.isidentifier, value)):
        return value
    if not isinstance(value, str | list):
        raise ValueError(
            f"{value!r:.40} where there should be arguments as a list, an object or lines of JSON"
        )
    values = [json.loads(line) for line in value.splitlines()] if isinstance(value, str) else value
    return [
        {int(key): item for key, item in each.items()}
        if isinstance(each, dict) and all(map(str.isdecimal, each))
        else each
        for each in values
    ]


def _of_assert(statement: ast.stmt) -> Test:
    call: ast.expr | None = statement.test if isinstance(statement, ast.Assert) else None
    expected: ast.expr = ast.Constant(value=True)
    if isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
        call = call.operand
        expected = ast.Constant(value=False)
    elif (
        isinstance(call, ast.Compare)
        and len(call.ops) == 1
        and isinstance(call.ops[0], ast.Eq | ast.Is)
    ):
        sides = call.left, call.comparators[0]
        # `3 == add(1, 2)` is the same test as `add(1, 2) == 3`.
        call, expected = sides[::-1] if isinstance(sides[1], ast.Call) else sides
    try:
        if not isinstance(call, ast.Call) or (call.args and call.keywords):
            raise ValueError("no call")
        by_name = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        arguments = by_name or [ast.literal_eval(each) for each in call.args]
        written = json.dumps(
            ast.literal_eval(expected), default=lambda each: sorted(each, key=repr)
        )
        return Test(arguments, json.loads(written), ast.unparse(call.func).replace("()", ""))
    except (ValueError, TypeError):
        raise ValueError(
            f"{ast.unparse(statement)!r:.60} compares no call with a literal value"
        ) from None
