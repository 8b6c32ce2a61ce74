"""Every key of the run file that a page names is one, and run files beside those of other programs are accepted."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from prefixrl.common.config.catalogue import ABSENT, SYNONYMS, settings
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from support.paths import ROOT

KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:`| = )")
NO_SETTINGS = {"ray", "python", "config", "problems"}
"""Commands and variables among the settings of other programs."""
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md"))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in models_in(each)]


def is_key(path: list[str], table: type[BaseModel] = RunConfig) -> bool:
    field = table.model_fields.get(path[0])
    if field is None:
        return False
    if len(path) == 1:
        return True
    inner = models_in(field.annotation)
    # A key of a free table, such as DeepSpeed's own configuration.
    return not inner or any(is_key(path[1:], model) for model in inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_that_a_page_names_exists(page: Path) -> None:
    named = {match.group(1) for match in KEY.finditer(page.read_text(encoding="utf-8"))}
    ours = [key.split(".") for key in named if key.split(".")[0] in RunConfig.model_fields]
    if page.stem.startswith("coming_from"):
        text = "\n".join(
            line.split(" | ", 1)[-1] for line in page.read_text(encoding="utf-8").splitlines()
        )
        ours = [
            key.split(".")
            for key in KEY.findall(text)
            if key.split(".")[0] in RunConfig.model_fields
        ]
        assert len(ours) > 3
    files = {".py", ".md", ".toml", ".json", ".png", ".jsonl"}
    assert [
        ".".join(path) for path in ours if not is_key(path) and f".{path[-1]}" not in files
    ] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem.startswith("coming_from_")], ids=lambda p: p.stem
)
def test_a_run_of_another_program_stands_beside_one_that_is_accepted(
    page: Path, tmp_path: Path
) -> None:
    there, ours = re.findall(
        r"^## (?:There|Here)\n\n```\w+\n(.*?)```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "run.toml").write_text(ours)
    (tmp_path / "mine.py").write_text("def right(question, text, gold): ...")
    config = load(tmp_path / "run.toml")
    assert (config.algorithm.samples_per_prompt, config.checkpoint.every) == (8, 50)
    names = (
        set(re.findall(r"^(?: *--| {4}|)([\w.]+)(?: ?=| \S|$)", there, re.MULTILINE)) - NO_SETTINGS
    )
    known = SYNONYMS.keys() | ABSENT.keys() | {each.key.rsplit(".", 1)[-1] for each in settings()}
    assert len(names) > 10
    assert [
        name
        for name in names
        if not known & {name, name.rsplit(".", 1)[-1], ".".join(name.split(".")[-2:])}
    ] == []
