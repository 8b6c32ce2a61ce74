"""Folders, package list and built wheel agree; rules that no linter can state hold."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from support.paths import ROOT

ROOTS = ("common", "deploy", "learner", "rollout", "scorer")
TOP = "deploy/python"
"""The folder that is installed as `prefixrl` itself."""
PICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PURE = (
    "learner/training/advantages.py",
    "learner/training/plan.py",
    "learner/training/ppo.py",
    "learner/broker/ledger.py",
    "learner/broker/window.py",
)
OPTIONAL = ("vllm", "flash_attn", "pyarrow", "starlette", "uvicorn")

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


def setuptools_table() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["tool"]["setuptools"]
    return table


def test_every_package_folder_is_listed_in_pyproject() -> None:
    folders = {
        init.parent.relative_to(ROOT).as_posix() for root in ROOTS for init in (ROOT / root).rglob("__init__.py")
    }
    names = {"prefixrl" if folder == TOP else f"prefixrl.{folder.replace('/', '.')}" for folder in folders}
    assert sorted(setuptools_table()["packages"]) == sorted(names)
    assert setuptools_table()["package-dir"] == {"prefixrl": TOP} | {f"prefixrl.{root}": root for root in ROOTS}


def test_every_source_file_lies_in_a_package() -> None:
    outside = [
        str(path.relative_to(ROOT))
        for path in source_files(*ROOTS)
        if not (path.parent / "__init__.py").exists() and not path.is_relative_to(ROOT / "deploy" / "examples")
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
    shutil.copy(ROOT / "pyproject.toml", source)
    for root in ROOTS:
        shutil.copytree(ROOT / root, source / root, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", source / "docs")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("prefixrl-*.whl")
    return built


def test_the_wheel_holds_every_source_file_the_examples_and_the_docs(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("prefixrl/")}
    shipped = (ROOT / "deploy/examples", ROOT / "deploy/systemd")
    examples = [path for folder in shipped for path in folder.rglob("*") if path.is_file()]
    typed = [ROOT / TOP / "py.typed"]
    shell = list((ROOT / "deploy/slurm").glob("*.sh"))
    pages = {f"prefixrl/deploy/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    expected = {
        f"prefixrl/{path.relative_to(ROOT).as_posix()}".replace(f"{TOP}/", "")
        for path in (*source_files(*ROOTS), *examples, *typed, *shell)
        if "__pycache__" not in path.parts
    }
    assert expected - held == set() and pages and pages - held == set()
    assert {name for name in held if "__pycache__" in name} == set()


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


def test_the_top_module_of_a_wheel_is_light_and_names_the_version(wheel: Path, tmp_path: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import prefixrl; print(prefixrl.__version__, prefixrl.__file__)\n"
        "prefixrl.Run; print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    version, file, heavy = done.stdout.split(maxsplit=2)
    with (ROOT / "pyproject.toml").open("rb") as pyproject:
        assert version == tomllib.load(pyproject)["project"]["version"]
    assert Path(file) == tmp_path / "prefixrl" / "__init__.py"
    assert heavy.strip() == "[]"


def test_nothing_imports_a_module_that_unpickles() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in source_files(*ROOTS, "tests", "benchmarks")
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] in PICKLING or name in ("torch.load", "torch.save")
    ]
    assert found == []


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
