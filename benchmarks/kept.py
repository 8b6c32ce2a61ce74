"""Runs that an interrupted benchmark leaves, so that the same command goes on later.

A run is kept under a key: everything it follows from, with a digest of the program that made it. The digest covers what
the program *does* in the files named: a changed comment, docstring or layout makes no run again, any other change does.
"""

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from benchmarks.results import ROOT

T = TypeVar("T")

TRAINING = ("learner/training/*.py", "benchmarks/aged_run.py")
"""Files that decide how samples of an exact age are made and trained."""


def program_digest(patterns: Sequence[str]) -> str:
    """Return a digest of the files' syntax trees without docstrings."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
        digest.update(f"{path.relative_to(ROOT)} {ast.dump(tree)}".encode())
    return digest.hexdigest()


def _is_text(node: ast.stmt) -> bool:
    """Return True for a docstring of a module, class, function or field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class _Line(msgspec.Struct, frozen=True):
    key: str
    run: msgspec.Raw


class KeptRuns(Generic[T]):
    """The file of kept runs beside a benchmark's results."""

    def __init__(self, results: Path, kind: type[T], patterns: Sequence[str]) -> None:
        self._path = results.with_suffix(".kept.jsonl")
        self._program = program_digest(patterns)
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        self._runs = {
            line.key: msgspec.json.decode(line.run, type=kind)
            for line in (msgspec.json.decode(line, type=_Line) for line in lines)
        }

    def get(self, key: object) -> T | None:
        """Return the run with this key, or None."""
        return self._runs.get(self._name(key))

    def add(self, key: object, run: T) -> None:
        """Keep a run; it is on disk when this returns."""
        self._runs[self._name(key)] = run
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode({"key": self._name(key), "run": run}) + b"\n")

    def remove(self) -> None:
        """Delete the file: the benchmark is finished."""
        self._path.unlink(missing_ok=True)

    def _name(self, key: object) -> str:
        return hashlib.blake2b(f"{self._program} {key!r}".encode(), digest_size=16).hexdigest()
