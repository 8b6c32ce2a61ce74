"""House rules that no linter states: budgets, where imports go, names used once, docstrings, package list and wheel."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from support.paths import ROOT

ROOTS = ("common", "deploy", "learner", "rollout", "scorer")
ENTRIES = 14
LINES, FUNCTION_LINES = 600, 60
RIDDLES = ("What", "Which", "Whether", "Who", "How", "Of", "Since")
FIRST_LINE_CHARS = 110
TOP = "deploy/python"
"""The folder that is installed as `prefixrl` itself."""
PICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PURE = (
    "learner/training/advantages.py",
    "learner/training/plan.py",
    "learner/training/ppo.py",
    "learner/broker/groups/ledger.py",
    "learner/broker/groups/window.py",
)
OPTIONAL = ("vllm", "flash_attn", "pyarrow")

IMPORT_EVERYTHING = """
import importlib, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
root, optional, names = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in optional:
            continue
        raise
    assert Path(module.__file__).is_relative_to(root), f"{name} came from {module.__file__}"
"""


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    """Every source file of the product, examples apart."""
    results = [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
    return [path for path in results if not path.is_relative_to(ROOT / "deploy" / "examples")]


def name_of(path: Path) -> str:
    return ".".join(("prefixrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
MODULES = {name_of(path) for path in TREES}


def imports(tree: ast.AST) -> set[str]:
    """Modules of the product that a file imports, for type checkers only or late too."""
    result = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = {f"{node.module}.{each.name}" for each in node.names}
            result |= names & MODULES or {node.module}
        elif isinstance(node, ast.Import):
            result |= {each.name for each in node.names} & MODULES
    return result


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


def between_siblings(depth: int) -> dict[str, set[str]]:
    """Imports between the parts of one folder, files and whole folders alike, at a depth below `prefixrl`."""
    result: dict[str, set[str]] = defaultdict(set)
    for module, imported in GRAPH.items():
        for other in imported:
            both = [name.split(".") for name in (module, other)]
            if (
                min(map(len, both)) > depth
                and both[0][:depth] == both[1][:depth]
                and both[0][depth] != both[1][depth]
            ):
                result[".".join(both[0][: depth + 1])].add(".".join(both[1][: depth + 1]))
    return result


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_two_parts_of_a_folder_import_each_other(depth: int) -> None:
    try:
        TopologicalSorter(between_siblings(depth)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those under fields included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(node, Documented) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_no_docstring_is_a_riddle() -> None:
    riddle = re.compile(rf'"""\s*({"|".join(RIDDLES)})\b')
    folders = (*ROOTS, "tests", "benchmarks")
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    actual = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path, source in texts.items()
        if riddle.search(source)
        for line, text in docstrings(ast.parse(source))
        if text.strip().partition(" ")[0].rstrip(",:;") in RIDDLES
    ]
    assert actual == []


def test_docstrings_of_functions_and_classes_begin_with_one_short_line() -> None:
    actual = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            if text and len(text.splitlines()[0]) > FIRST_LINE_CHARS:
                actual.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert actual == []


def test_files_and_functions_are_short() -> None:
    actual = []
    for path, tree in TREES.items():
        name, lines = (
            str(path.relative_to(ROOT)),
            len(path.read_text(encoding="utf-8").splitlines()),
        )
        if lines > LINES:
            actual.append(f"{name}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                    actual.append(f"{name}: {node.name} has {lines} lines")
    assert actual == []


def folders() -> list[Path]:
    """Every folder of product and tests."""
    results = {path.parent for root in (*ROOTS, "tests") for path in (ROOT / root).rglob("*.py")}
    return sorted(path for path in results if not path.is_relative_to(ROOT / "deploy" / "examples"))


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_shows_few_entries(folder: Path) -> None:
    entries = [path.name for path in folder.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= ENTRIES, (
        f"put the new file into another folder, or some files into a new one: {sorted(entries)}"
    )


@pytest.mark.parametrize(
    "init", [path for path in TREES if path.name == "__init__.py"], ids=name_of
)
def test_the_text_of_a_folder_names_everything_in_it(init: Path) -> None:
    text = ast.get_docstring(TREES[init]) or ""
    files = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in init.parent.glob("*/__init__.py")}
    missing = {name for name in files | folders if name not in text}
    assert missing == set(), f"name them in the docstring of {init}"


def source_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_command_that_is_printed_to_be_copied_quotes_its_paths() -> None:
    raw = re.compile(r"""(?:`|\()prefixrl [^`")]*(?:\{(?!to_copy|size)|%s)|chmod \d+ \{(?!shlex)""")
    actual = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in TREES
        for line in raw.findall(path.read_text())
    ]
    assert actual == []


def test_no_wait_goes_by_a_clock_that_jumps() -> None:
    stamps = {
        "directory_format.py",
        "uploads.py",
        "resume.py",
        "collapse_answers.py",
        "http_client.py",
        "app.py",
        "openai_format.py",
    }
    actual = {
        path.name
        for path in TREES
        if re.search(r"\btime\.time\(|datetime\.now\(", path.read_text())
    }
    assert actual == stamps, (
        "these write the time of day down, or read it from an endpoint; all else is time.monotonic"
    )


def setuptools_table() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["tool"]["setuptools"]
    return table


def test_every_package_folder_is_listed_in_pyproject() -> None:
    folders = {
        init.parent.relative_to(ROOT).as_posix()
        for root in ROOTS
        for init in (ROOT / root).rglob("__init__.py")
    }
    names = {
        "prefixrl" if folder == TOP else f"prefixrl.{folder.replace('/', '.')}"
        for folder in folders
    }
    assert sorted(setuptools_table()["packages"]) == sorted(names)
    assert setuptools_table()["package-dir"] == {"prefixrl": TOP} | {
        f"prefixrl.{root}": root for root in ROOTS
    }


def test_every_source_file_lies_in_a_package() -> None:
    outside = [
        str(path.relative_to(ROOT))
        for path in source_files(*ROOTS)
        if not (path.parent / "__init__.py").exists()
        and not path.is_relative_to(ROOT / "deploy" / "examples")
    ]
    assert outside == []


def test_type_checkers_see_every_package_through_a_link() -> None:
    for root in ROOTS:
        link = ROOT / ".types" / "prefixrl" / root
        assert link.is_symlink(), f"{link} is not a symlink"
        assert link.resolve() == ROOT / root
    assert (ROOT / ".types/prefixrl/__init__.py").resolve() == ROOT / TOP / "__init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy: setuptools builds beside the source, and packs what an earlier build left there.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for root in ROOTS:
        shutil.copytree(
            ROOT / root, source / root, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "docs", source / "docs")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("prefixrl-*.whl")
    return built


def test_the_wheel_holds_every_source_file_the_examples_and_the_docs(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("prefixrl/")}
        (about,) = (
            archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")
        )
    assert about.endswith((ROOT / "README.md").read_text())
    examples = [path for path in (ROOT / "deploy/examples").rglob("*") if path.is_file()]
    typed = [ROOT / TOP / "py.typed"]
    templates = [
        path for each in ("templates", "page") for path in (ROOT / "deploy").glob(f"*/{each}/*")
    ]
    templates += [
        path
        for root in ROOTS
        for end in ("toml", "txt")
        for path in (ROOT / root).rglob(f"*.{end}")
    ]
    pages = {f"prefixrl/deploy/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    expected = {
        f"prefixrl/{path.relative_to(ROOT).as_posix()}".replace(f"{TOP}/", "")
        for path in (*source_files(*ROOTS), *examples, *typed, *templates)
        if "__pycache__" not in path.parts
    }
    assert templates and expected - held == set() and pages and pages - held == set()
    assert {name for name in held if "__pycache__" in name} == set()


@pytest.mark.slow
def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((tmp_path / "prefixrl").rglob("*.py"))
    ]
    # Run elsewhere than the root, whose folders would be importable by their bare names.
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{IMPORT_EVERYTHING}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), ",".join(OPTIONAL), *modules],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_top_module_of_a_wheel_is_light_and_names_the_version(
    wheel: Path, tmp_path: Path
) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import prefixrl; print(prefixrl.__version__, prefixrl.__file__)\n"
        "prefixrl.Run; print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    version, file, heavy = done.stdout.split(maxsplit=2)
    with (ROOT / "pyproject.toml").open("rb") as pyproject:
        assert version == tomllib.load(pyproject)["project"]["version"]
    assert Path(file) == tmp_path / "prefixrl" / "__init__.py"
    assert heavy.strip() == "[]"


def test_nothing_imports_a_module_that_unpickles() -> None:
    actual = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in source_files(*ROOTS, "tests", "benchmarks")
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] in PICKLING or name in ("torch.load", "torch.save")
    ]
    assert actual == []


@pytest.mark.parametrize("name", PURE)
def test_a_pure_file_knows_no_process_group(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    imported = [n for n in imported_names(tree) if n.startswith(("torch.distributed", "deepspeed"))]
    used = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    assert imported + used == []
