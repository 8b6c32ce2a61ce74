"""`prefixrl init`: run files that are accepted, and refusals by name."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixrl.common.config.load import load
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands.init import RECIPES, Size
from prefixrl.learner.__main__ import main as check
from prefixrl.learner.data.problems import read
from support.paths import ROOT
from support.runs.run_helper import finish, launched

EXAMPLE = ROOT / "deploy/examples/arithmetic"
MODELS = ("--adapter", str(EXAMPLE / "adapter"), "--target", str(EXAMPLE / "target"))
DATA = ("--data", str(EXAMPLE / "train.jsonl"), "--eval", str(EXAMPLE / "heldout.jsonl"))


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments], catch_exceptions=False)


def written(folder: Path, *arguments: str) -> Path:
    printed = init(*arguments)
    assert printed.exit_code == 0, printed.output
    path = folder / "run.toml"
    path.write_text(printed.output)
    return path


@pytest.mark.parametrize("size", RECIPES)
def test_the_printed_file_passes_the_check(size: Size, tmp_path: Path) -> None:
    path = written(tmp_path, "--size", size, *MODELS, *DATA)
    checked = CliRunner().invoke(check, [str(path), "--check"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.stderr
    assert f"{RECIPES[size]['groups']} groups x 8 rows" in checked.stdout


def test_the_size_is_that_of_the_adapters_files(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "config.json").write_text("{}")
    for size_bytes, named in (
        (2**20, "tiny"),
        (269_000_000, "small"),
        (3 * 2**30, "1b"),
        (15 * 2**30, "7b"),
    ):
        with (adapter / "model.safetensors").open("wb") as file:
            file.truncate(size_bytes)  # takes no place on the disk
        assert f"--size {named}`" in init("--adapter", str(adapter), *MODELS[2:], *DATA).output


@pytest.mark.parametrize("size", RECIPES)
def test_the_table_of_the_docs_has_the_values_of_the_printed_file(
    size: Size, tmp_path: Path
) -> None:
    config = load(written(tmp_path, "--size", size, *MODELS, *DATA)).model_dump()
    text = (
        (ROOT / "docs/training.md")
        .read_text()
        .partition("## Values by size")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line[:3] == "| `"
    ]
    column = 1 + list(RECIPES).index(size)
    for key, *values in rows:
        if key != "[learner.lora]":
            section, name = key.split(".")
            assert str(config[section][name]) == values[column - 1], key
    lora = config["learner"]["lora"]
    assert rows[-1][column] == ("no" if lora is None else f"rank {lora['rank']}")


def test_hub_names_and_problem_sets_stay_names() -> None:
    names = (
        "--adapter",
        "Qwen/Qwen2.5-1.5B",
        "--target",
        "Qwen/Qwen2.5-7B",
        "--data",
        "math_filtered",
    )
    text = init("--size", "1b", *names).output
    assert 'directory = "runs/math_filtered"' in text
    assert (
        'model = "Qwen/Qwen2.5-1.5B"' in text
        and 'train = "math_filtered"' in text
        and 'eval = "math500"' in text
    )


def test_families_are_found_and_columns_of_other_names_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1", "solution": "2", "family": "sums"}\n')
    data = load(written(tmp_path, *MODELS, "--data", str(tmp_path / "mine.jsonl"))).data
    assert data.family_column == "family" and data.eval == ()
    (problem,) = read(data.train, data).problems
    assert (problem.question, problem.gold, problem.family) == ("1+1", "2", "sums")


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, said in (
        (
            ("--adapter", "/no/such", *MODELS[2:], *DATA),
            "--adapter /no/such: there is no such folder",
        ),
        (("--adapter", str(empty), *MODELS[2:], *DATA), "holds no model (no config.json)"),
        ((*MODELS[:2], "--target", "./no", *DATA), "--target ./no: there is no such folder"),
        ((*MODELS, "--data", "no.jsonl"), "--data no.jsonl: there is no such file or folder"),
        ((*MODELS, *DATA[:2], "--eval", "gone.jsonl"), "--eval gone.jsonl"),
        (("--adapter", "a/hub", *MODELS[2:], *DATA), "give --size"),
    ):
        refused = init(*arguments)
        assert refused.exit_code == 2 and said in refused.output, refused.output


@pytest.mark.nightly
def test_the_printed_file_trains(tmp_path: Path) -> None:
    path = written(tmp_path, *MODELS, *DATA)
    settings = (
        "evaluation.problems=128",
        "algorithm.iterations=100",
    )  # its adapter leans to the right opening already
    with launched(tmp_path / "run", *settings, run_file=path) as process:
        summary = finish(process, tmp_path / "run")
    accuracy = summary["accuracy"]
    assert accuracy["trained_adapter"] > accuracy["untrained_adapter"] + 0.3
