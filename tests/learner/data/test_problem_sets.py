"""Every problem set of the registry, from a file in its published schema to a verdict.

The files hold problems of our own, laid out as the sets are published: names, formats and columns. Every set has some
good rows, each with an answer that is right and one that is wrong, and rows that cannot be used.
"""

import csv
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from prefixrl.common.config.data import PROBLEM_SETS, DataConfig, resolve
from prefixrl.common.config.load import load
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.learner.data.problems import Loaded, read
from prefixrl.scorer.verifier.pool import VerifierPool
from support.models.chat_tokenizers import llama, qwen
from support.paths import ROOT
from support.rows import jsonl

PATIENCE_S = 240.0
NAMES = sorted(PROBLEM_SETS)
Values = dict[str, Any]


class Good(msgspec.Struct):
    """A row, and what a model may write for it."""

    values: Values
    right: str
    wrong: str


class Published(msgspec.Struct):
    """One set: its files, whose names tell their format, and what they hold."""

    files: tuple[str, ...]
    good: tuple[Good, ...]
    bad: tuple[tuple[Values, str], ...]
    """Rows that cannot be used, with a piece of the reason."""


PUBLISHED = msgspec.json.decode(
    Path(__file__).with_name("published_sets.json").read_bytes(), type=dict[str, Published]
)


def parquet(folder: Path, rows: list[Values], *names: str) -> None:
    """Write one file, or the rows spread over several."""
    columns = {name for row in rows for name in row}
    whole = [{name: row.get(name) for name in columns} for row in rows]
    schema = pa.Table.from_pylist(whole).schema
    size = -(-len(rows) // len(names))
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = whole[index * size : (index + 1) * size]
        pa.parquet.write_table(pa.Table.from_pylist(part, schema), path)


def csv_file(folder: Path, rows: list[Values], name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)


def publish(name: str, folder: Path) -> Path:
    """Write a set, good rows first, into a folder of its own; for `math_filtered` also what it leaves out."""
    published = PUBLISHED[name]
    rows = [good.values for good in published.good] + [values for values, _ in published.bad]
    writers: dict[str, Callable[..., None]] = {
        ".parquet": parquet,
        ".jsonl": jsonl,
        ".csv": csv_file,
    }
    writers[Path(published.files[0]).suffix](folder / name, rows, *published.files)
    return folder / name


def qwen_text(question: str) -> str:
    """Return the text of a prompt of Qwen's shape."""
    return f"<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def llama_text(question: str) -> str:
    """Return the text of a prompt of Llama's shape."""
    return (
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{question.strip()}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def loaded(name: str, folder: Path) -> Loaded:
    """A set as a run file names it, its files in a local folder."""
    paths = {name: str(publish(name, folder))}
    if name == "math_filtered":
        paths["math500"] = str(publish("math500", folder))
    data = resolve(DataConfig.model_validate({"train": name, "paths": paths}), folder)
    return read(data.train, data)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    verifiers = VerifierPool(1, 20)
    yield verifiers
    verifiers.close()


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Renderer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return Renderer(str(qwen(folder / "qwen")), 2048), Renderer(str(llama(folder / "llama")), 2048)


def test_every_problem_set_has_files_of_ours() -> None:
    assert sorted(PUBLISHED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_good_rows_are_problems_and_bad_ones_are_named_with_number_and_reason(
    name: str, tmp_path: Path
) -> None:
    actual = loaded(name, tmp_path)
    good, bad = PUBLISHED[name].good, PUBLISHED[name].bad
    assert len(actual.problems) == len(good)
    assert len({problem.prompt_id for problem in actual.problems}) == len(good)
    bad_rows = [row for row in actual.bad if "without" not in row.source]
    assert len(bad_rows) == len(bad), actual.bad
    for row, (_, reason) in zip(bad_rows, bad, strict=True):
        assert reason in row.reason, row
        assert row.row > 0 and row.file


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_rendered_by_both_chat_templates_suffix_and_all(
    name: str, renderers: tuple[Renderer, Renderer], tmp_path: Path
) -> None:
    suffix = PROBLEM_SETS[name].suffix
    for problem in loaded(name, tmp_path).problems:
        assert problem.question.endswith(suffix)
        for renderer, expected in zip(renderers, (qwen_text, llama_text), strict=True):
            ids = renderer.prompt(problem.question)
            assert renderer._tokenizer.decode(ids.tolist()) == expected(problem.question)


@pytest.mark.parametrize("name", NAMES)
def test_the_gold_answer_scores_1_and_a_wrong_one_0(
    name: str, pool: VerifierPool, tmp_path: Path
) -> None:
    problems, good = loaded(name, tmp_path).problems, PUBLISHED[name].good
    for key, (problem, row) in enumerate(zip(problems, good, strict=True)):
        pool.submit(2 * key, row.right, problem.gold, problem.question, problem.code)
        pool.submit(2 * key + 1, row.wrong, problem.gold, problem.question, problem.code)
    actual, deadline_s = {}, time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline_s, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        actual |= dict(pool.poll())
    for key, problem in enumerate(problems):
        right, wrong = actual[2 * key], actual[2 * key + 1]
        assert (right.reward, right.status) == (1.0, "ok"), (problem, right)
        assert wrong.reward == 0.0 and wrong.status != "error", (problem, wrong)


def test_the_documentation_names_every_set_with_its_place_and_size_and_its_example_loads(
    tmp_path: Path,
) -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    rows_of_page = dict(re.findall(r"^\| `(\w+)` \| (.*?\| [\d,]+) \|", text, re.MULTILINE))
    assert sorted(rows_of_page) == NAMES
    for name, problem_set in PROBLEM_SETS.items():
        assert rows_of_page[name].endswith(f"| {problem_set.problems:,}")
        if problem_set.hub and not problem_set.same_files_as:
            assert f"`{problem_set.hub}`" in rows_of_page[name]
    (example,) = (
        block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[data]" in block
    )
    example = example.replace('"/data/', f'"{tmp_path}/')
    for name in ("MATH", "MATH-500", "mine.jsonl"):
        (tmp_path / name).touch()
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'directory = "run"\nadapter.model = "a/b"\ntarget.model = "a/c"\n{example}'
    )
    config = load(run_file)
    assert config.data.weights == (0.7, 0.3)
    assert [source.label for source in config.data.eval] == ["math500", "amc23"]
    assert config.data.eval[1].path == "hf:math-ai/amc23"
