"""Names say what a thing is, and nothing is packed: checks that no formatter makes."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.sizes import counts_of

from support.paths import ROOT

FOLDERS = ("common", "learner", "rollout", "scorer", "deploy")
VAGUE = {
    "each",
    "found",
    "own",
    "given",
    "asked",
    "told",
    "held",
    "made",
    "seen",
    "shown",
    "known",
    "wanted",
    "theirs",
    "done",
    "named",
    "taken",
    "kept",
    "listed",
    "shared",
    "rung",
    "left",
    "gone",
    "marked",
    "tried",
    "there",
    "those",
    "that",
    "one",
    "ones",
    "others",
    "rest",
}
"""Participles and pronouns: they say nothing of what they name."""
VERBS = {
    "take",
    "note",
    "look",
    "share",
    "shared",
    "lose",
    "of",
    "listed",
    "give",
    "give_up",
    "tell",
    "told",
    "know",
    "known",
    "show",
    "shown",
    "ask",
    "asked",
    "hold",
    "held",
    "find",
    "found",
    "make",
    "made",
    "want",
    "wanted",
}
"""A function of such a name does not say what it takes, notes or makes."""
MOST_SKIPS, LEAST_WORDS = 20, 12
CODE = re.compile(
    r"\bdef \w+\(|^\s*(import \w+|from [\w.]+ import )|\blambda\b.*:|\(\?[:=!<P]|\\[dwsbDWSB]\b|\[\^|\\\\[dwsb]",
    re.M,
)
"""Python, or a regular expression."""


def product_files() -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "deploy" / "examples")
    ]


def all_files() -> list[Path]:
    folders = (*FOLDERS, "tests", "benchmarks")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def vague_names(source: str) -> list[str]:
    """Return `line: name` of every vague variable in a scope longer than a comprehension."""
    tree = ast.parse(source)
    inside = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        for generator in node.generators
        for target in ast.walk(generator.target)
    }
    inside |= {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        for argument in ast.walk(node.args)
    }
    return [f"{line}: {name}" for line, name in bindings(tree, inside) if name in VAGUE]


def bindings(tree: ast.AST, inside: set[int]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def verb_names(source: str) -> list[str]:
    """Return `line: name` of every function whose name is a verb without a noun."""
    return [
        f"{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.strip("_") in VERBS
    ]


def skips_of(source: str) -> tuple[int, list[int]]:
    """Return the number of `# fmt: skip` on lists of words, and the lines of all others."""
    if "fmt:" not in source:
        return 0, []
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    on_lists = {node.end_lineno for node in statements if has_many_words(node)}
    lines = [
        number
        for number, line in enumerate(source.splitlines(), 1)
        if re.search(r"#\s*fmt:\s*(skip|off|on)", line.partition('"')[0] + line.rpartition('"')[2])
    ]
    return sum(line in on_lists for line in lines), [line for line in lines if line not in on_lists]


def has_many_words(node: ast.stmt) -> bool:
    """Return True for an assignment of at least `LEAST_WORDS` words and nothing else."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    value = node.value
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    items = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else []
    words = [
        item for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    return len(items) >= LEAST_WORDS and len(words) == len(items)


def strings_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield str(key)
            yield from strings_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings_of(part)
    elif isinstance(value, str):
        yield value


def code_in_data(path: Path) -> list[str]:
    """Return the texts of a data file that are Python or a regular expression."""
    text = path.read_text(encoding="utf-8")
    texts = strings_of(tomllib.loads(text)) if path.suffix == ".toml" else [text]
    return [found.strip()[:60] for found in texts if CODE.search(found)]


def data_files() -> list[Path]:
    return [
        path
        for folder in FOLDERS
        for end in ("toml", "txt", "json", "yaml", "cfg", "ini")
        for path in sorted((ROOT / folder).rglob(f"*.{end}"))
        if not path.is_relative_to(ROOT / "deploy" / "examples") and "docs" not in path.parts
    ]


def faults(check: object, files: list[Path]) -> list[str]:
    assert callable(check)
    return [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in files
        for fault in check(path.read_text(encoding="utf-8"))
    ]


def test_no_variable_of_the_product_has_a_name_that_says_nothing() -> None:
    assert faults(vague_names, product_files()) == []


def test_no_function_of_the_product_is_named_by_a_verb_alone() -> None:
    assert faults(verb_names, product_files()) == []


def test_lines_are_packed_nowhere_but_in_lists_of_words() -> None:
    skips = {path: skips_of(path.read_text(encoding="utf-8")) for path in all_files()}
    assert {str(path): lines for path, (_, lines) in skips.items() if lines} == {}
    assert sum(number for number, _ in skips.values()) <= MOST_SKIPS


def test_no_data_file_of_the_product_holds_code() -> None:
    assert {str(path): code for path in data_files() if (code := code_in_data(path))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "for each in rows:\n    print(each)",
        "found = 1",
        "def count(given):\n    return given",
        "own, rows = 1, 2",
    ],
)
def test_a_planted_vague_name_is_found(source: str) -> None:
    assert len(vague_names(source)) == 1


@pytest.mark.parametrize(
    "source", ["rows = [each for each in rows]", "by = lambda each: each.name"]
)
def test_a_comprehension_may_have_one(source: str) -> None:
    assert vague_names(source) == []


@pytest.mark.parametrize(
    "source", ["def take():\n    pass", "class A:\n    def _note(self):\n        pass"]
)
def test_a_planted_verb_without_a_noun_is_found(source: str) -> None:
    assert len(verb_names(source)) == 1


def test_a_planted_skip_is_found_and_one_on_a_list_of_words_is_counted() -> None:
    words = ", ".join(f'"{word}"' for word in "abcdefghijkl")
    assert skips_of("a = f(1,\n  2)  # fmt: skip") == (0, [2])
    assert skips_of(f"WORDS = {{{words}}}  # fmt: skip") == (1, [])
    assert skips_of(f"WORDS = {{{words}, 1}}  # fmt: skip") == (0, [1])


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.kill(1, 9)",
        r'look = "\\d+(?:st|th)"',
        "program = '''\ndef main():\n    pass\n'''",
        r"alphabet = '[^a-z]+'",
    ],
)
def test_planted_code_in_a_data_file_is_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.txt" if text.startswith("import") else "a.toml")
    path.write_text(text)
    assert code_in_data(path) != []


def test_a_docstring_is_no_code_and_every_other_token_counts() -> None:
    assert counts_of('"""A text."""\n# why\na = f(1)\n') == (3, 1, 6)
