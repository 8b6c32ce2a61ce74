"""House rules that no linter states: where imports go, names used once, short files, docstrings without riddles."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.paths import ROOT

ROOTS = ("common", "deploy", "learner", "rollout", "scorer")
FLOORS = {
    "common": (
        ("errors", "seeds"),
        ("process", "hub"),
        ("wire",),
        ("config",),
        ("digests",),
        ("run", "weights"),
        ("engines",),
        ("worker",),
    ),
    "learner": (
        ("data",),
        ("training",),
        ("run",),
        ("broker",),
        ("weights",),
        ("servers",),
        ("evaluation",),
        ("loop",),
        ("start", "ranks"),
        ("__main__",),
    ),
}
"""From low to high. A file or folder imports nothing above its own floor, and nothing beside it on that floor."""
SAME_ROLE = {"__init__", "__main__", "loop", "start", "server", "status", "child"}
"""File names that stand in several folders because the files have the same role there."""
ENTRIES = 13
LINES, FUNCTION_LINES = 400, 60
RIDDLES = ("What", "Which", "Whether", "Who", "How", "Of", "Since")
FIRST_LINE_CHARS = 90
LONG = {"common/wire/messages.py"}
"""One file for all that crosses a socket."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    """Every source file of the product, examples apart."""
    found = [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    return [path for path in found if not path.is_relative_to(ROOT / "deploy" / "examples")]


def name_of(path: Path) -> str:
    return ".".join(("prefixrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
MODULES = {name_of(path) for path in TREES}


def imports(tree: ast.AST) -> set[str]:
    """Modules of the product that a file imports, for type checkers only or late too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= names & MODULES or {node.module}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & MODULES
    return found


GRAPH = {name_of(path): imports(tree) - {name_of(path)} for path, tree in TREES.items()}


def test_no_import_goes_round_in_a_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_planted_circle_is_found() -> None:
    low, high = "prefixrl.common.errors", "prefixrl.learner.loop"
    with pytest.raises(CycleError):
        TopologicalSorter(GRAPH | {low: {high}}).prepare()


@pytest.mark.parametrize("root", FLOORS)
def test_every_part_of_a_folder_has_a_floor(root: str) -> None:
    parts = {path.stem for path in (ROOT / root).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} == {part for floor in FLOORS[root] for part in floor}


@pytest.mark.parametrize("root", FLOORS)
def test_no_import_climbs_to_a_higher_floor(root: str) -> None:
    floor_of = {part: number for number, floor in enumerate(FLOORS[root]) for part in floor}
    climbing = []
    for module, imported in GRAPH.items():
        for other in imported:
            both = [name.split(".")[1:3] for name in (module, other)]
            if any(len(each) < 2 or each[0] != root for each in both) or both[0] == both[1]:
                continue
            if floor_of[both[0][1]] <= floor_of[both[1][1]]:
                climbing.append(f"{module} -> {other}")
    assert climbing == []


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_file_name_stands_twice_only_where_the_role_is_the_same() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in TREES:
        places[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in SAME_ROLE} == {}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those under fields included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(node, Documented) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_docstring_is_a_riddle() -> None:
    others = {
        path: ast.parse(path.read_text()) for root in ("tests", "benchmarks") for path in (ROOT / root).rglob("*.py")
    }
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path, tree in (TREES | others).items()
        for line, text in docstrings(tree)
        if text.strip().partition(" ")[0].rstrip(",:;") in RIDDLES
    ]
    assert found == []


def test_docstrings_of_functions_and_classes_begin_with_one_short_line() -> None:
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            if text and len(text.splitlines()[0]) > FIRST_LINE_CHARS:
                found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


def test_files_and_functions_are_short() -> None:
    found = []
    for path, tree in TREES.items():
        name, lines = str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines())
        if lines > LINES and name not in LONG:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                    found.append(f"{name}: {node.name} has {lines} lines")
    assert found == []


@pytest.mark.parametrize("root", FLOORS)
def test_a_folder_of_folders_shows_few_entries(root: str) -> None:
    entries = [path.name for path in (ROOT / root).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= ENTRIES, sorted(entries)


@pytest.mark.parametrize("init", [path for path in TREES if path.name == "__init__.py"], ids=name_of)
def test_the_text_of_a_folder_names_everything_in_it(init: Path) -> None:
    text = ast.get_docstring(TREES[init]) or ""
    files = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in init.parent.glob("*/__init__.py")}
    assert {name for name in files | folders if name not in text} == set()
