"""Functions around a model's program in the sandbox.

`programs.py` sends the text of this file, then a call of one of them. They have the standard
library alone, and import late what only one of them needs: a program pays for every import. `usual`
is a source that makes names which programs use without an import.
"""


def run_script(program: str, usual: str) -> None:
    """Run a program as a script."""
    space: dict[str, object] = {"__name__": "__main__"}
    exec(usual, space)
    exec(compile(program, "program.py", "exec"), space)


def print_value(program: str, usual: str) -> None:
    """Print the value of a program: of its last line, or of its last function if that ends it."""
    import ast
    import decimal

    space: dict[str, object] = {"__name__": "__main__"}
    exec(usual, space)
    tree = ast.parse(program)
    last_value = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last_value = ast.Expression(tree.body[-1].value)
        tree.body.pop()
    exec(compile(tree, "program.py", "exec"), space)
    value = None
    if last_value is not None:
        value = eval(compile(last_value, "program.py", "eval"), space)  # noqa: S307 -- in the sandbox
    elif tree.body and isinstance(tree.body[-1], ast.FunctionDef):
        value = space[tree.body[-1].name]()  # type: ignore[operator]
    if value is not None:
        is_float = isinstance(value, float)
        print()  # noqa: T201 -- stdout is the way out; a line of its own
        print(format(decimal.Decimal(repr(value)), "f") if is_float else value)  # noqa: T201


def print_result(
    program: str, usual: str, name: str, arguments: list[object] | dict[str, object]
) -> None:
    """Print the JSON of what a function of a program returns; what the program prints is dropped.

    `name` is a function, `Class.method`, or a method of the class `Solution`. `arguments` are a
    list, or a dict of named ones.
    """
    import json
    import os

    result = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    space: dict[str, object] = {"__name__": "program"}
    exec(usual, space)
    before = dict(space)
    exec(compile(program, "program.py", "exec"), space)
    defined = {key: value for key, value in space.items() if before.get(key) is not value}
    owner, _, name = name.rpartition(".")
    if owner not in defined:
        owner = "Solution" if "Solution" in defined else ""
    function = getattr(defined[owner](), name) if owner else defined[name]  # type: ignore[operator]
    value = (
        function(**arguments)  # type: ignore[operator]
        if isinstance(arguments, dict)
        else function(*arguments)  # type: ignore[operator]
    )
    result.write(json.dumps(value, default=lambda items: sorted(items, key=repr)))
    result.close()
