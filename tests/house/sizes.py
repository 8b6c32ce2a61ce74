"""Lines and tokens of each folder of the product, as information: `python tests/house/sizes.py`."""
# ruff: noqa: T201 -- printing is its purpose

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "learner", "rollout", "scorer", "deploy")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings, those under fields included."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


def counts_of(source: str) -> tuple[int, int, int]:
    """Return lines, lines of code and tokens of code; neither comments nor docstrings are code."""
    texts, code_lines, tokens = docstring_lines(ast.parse(source)), set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and token.start[0] in texts
        if token.type not in LAYOUT and not is_text:
            tokens += 1
            code_lines.update(range(token.start[0], token.end[0] + 1))
    return len(source.splitlines()), len(code_lines), tokens


def main() -> None:
    """Print a row for each folder and one for all."""
    print(f"{'':10} {'lines':>8} {'code':>8} {'tokens':>8} {'tokens per line of code':>24}")
    sums = [0, 0, 0]
    for folder in FOLDERS:
        row = [0, 0, 0]
        for path in (ROOT / folder).rglob("*.py"):
            if not path.is_relative_to(ROOT / "deploy" / "examples"):
                row = [a + b for a, b in zip(row, counts_of(path.read_text()), strict=True)]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        print(f"{folder:10} {row[0]:8,} {row[1]:8,} {row[2]:8,} {row[2] / row[1]:24.2f}")
    print(f"{'all':10} {sums[0]:8,} {sums[1]:8,} {sums[2]:8,} {sums[2] / sums[1]:24.2f}")


if __name__ == "__main__":
    main()
