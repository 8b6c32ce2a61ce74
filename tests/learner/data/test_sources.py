"""Sources of problems: files of every format, folders, the hub; rows that are left out; bad rows."""

import codecs
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from prefixrl.common.config.data import DataConfig, resolve
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.learner.data import problems
from prefixrl.learner.data.problems import BadRow, Loaded, read
from prefixrl.learner.run.directory import RunDirectory, inputs
from support.fakes import run_on_disk
from support.models.chat_tokenizers import llama, qwen
from support.rows import jsonl

REMEDY = "; question_column and answer_column name others"
ROWS = [{"id": f"r{i}", "question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(4)]


def found(folder: Path, train: Any, **data: Any) -> Loaded:
    """Return the problems that a run file in `folder` with this `[data]` reads."""
    resolved = resolve(DataConfig.model_validate({"train": train} | data), folder)
    return read(resolved.train, resolved)


def ids(loaded: Loaded) -> list[str]:
    return [problem.prompt_id for problem in loaded.problems]


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def arrow(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write a folder as `datasets` does: Arrow streams beside JSON files that hold no rows."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name}], "_split": None})
    )
    (folder / "dataset_info.json").write_text('{"features": {}}')
    arrow_stream(folder / name, rows)


def write_as(kind: str, folder: Path) -> str:
    """The four rows in one of the formats; the path to give."""
    if kind == "arrow":
        arrow(folder / "saved", ROWS)
        return "saved"
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            jsonl(folder, ROWS, path.name)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            lines = [",".join(ROWS[0]), *(",".join(row.values()) for row in ROWS)]
            path.write_text("\r\n".join(lines), encoding="utf-8-sig")
        case _:
            pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path.name


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_format_holds_the_same_problems(kind: str, tmp_path: Path) -> None:
    loaded = found(tmp_path, write_as(kind, tmp_path))
    assert [(problem.prompt_id, problem.question, problem.gold) for problem in loaded.problems] == [
        tuple(row.values()) for row in ROWS
    ]
    assert not loaded.bad


def test_what_map_and_filter_leave_in_a_saved_folder_is_no_data(tmp_path: Path) -> None:
    for split in ("train", "test"):
        arrow(tmp_path / "saved" / split, ROWS)
        mapped = [row | {"id": f"{row['id']} mapped"} for row in ROWS]
        arrow_stream(tmp_path / "saved" / split / "cache-1bf753329d289b41.arrow", mapped)
        arrow_stream(tmp_path / "saved" / split / "cache-d85021b36529c86c.arrow", [{"indices": 2}])
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    loaded = found(tmp_path, {"path": "saved", "split": "train"})
    assert ids(loaded) == [row["id"] for row in ROWS] and not loaded.bad
    (tmp_path / "saved/train/state.json").write_text(
        '{"_data_files": [{"filename": "data-00001-of-00002.arrow"}]}'
    )
    with pytest.raises(
        DataError, match=r"state.json names 'data-00001-of-00002.arrow', which is not there"
    ):
        found(tmp_path, {"path": str(tmp_path / "saved")})
    (tmp_path / "saved/train/state.json").write_text('{"_data_files": [')
    with pytest.raises(
        DataError,
        match=r"saved/train/state\.json should name the data files of its folder: Input data",
    ):
        found(tmp_path, {"path": "saved", "split": "train"})


def test_columns_are_mapped_per_source_and_nested_ones_by_their_path(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"q": {"text": "Half of 6?"}, "a": 3, "kind": "halves"}], "mine.jsonl")
    source = {"path": "mine.jsonl", "question_column": "q.text", "answer_column": "a"}
    (problem,) = found(tmp_path, source | {"family_column": "kind", "suffix": " Box it."}).problems
    assert (problem.question, problem.gold, problem.family) == ("Half of 6? Box it.", "3", "halves")
    assert problem.prompt_id == "1", "without an id column the row's number"


def test_a_folder_is_read_by_split_and_subset(tmp_path: Path) -> None:
    for subset in ("easy", "hard"):
        for split in ("train", "test"):
            rows = [{"question": f"{subset} {split}?", "answer": "1"}]
            pa_file = tmp_path / f"set/{subset}/{split}-00000-of-00001.parquet"
            pa_file.parent.mkdir(parents=True, exist_ok=True)
            pa.parquet.write_table(pa.Table.from_pylist(rows), pa_file)

    def questions(**keys: Any) -> list[str]:
        return [problem.question for problem in found(tmp_path, {"path": "set"} | keys).problems]

    assert questions(split="test") == ["easy test?", "hard test?"]
    assert questions(split="train", subset="hard") == ["hard train?"]
    assert questions(split="train+test", subset="easy") == ["easy test?", "easy train?"]
    with pytest.raises(DataError, match="has the splits test, train: choose, split = 'test' or"):
        questions()
    with pytest.raises(DataError, match=r"no data for split dev, subset any; looked for \.jsonl"):
        questions(split="dev")
    with pytest.raises(DataError, match="no data for split validation, subset any"):
        questions(split="train+validation")


def test_the_original_math_folder_is_read_file_by_file_and_named_like_math_500(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        for number, level in ((1, 2), (2, 4)):
            path = tmp_path / f"MATH/{split}/algebra/{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(
                    {
                        "problem": f"What is {number} in the {split} half?",
                        "level": f"Level {level}",
                        "type": "Algebra",
                        "solution": f"\\boxed{{{number}}}",
                    }
                )
            )
    paths = {"math": "MATH"}
    assert ids(found(tmp_path, "math", paths=paths)) == [
        "math:train/algebra/1.json",
        "math:train/algebra/2.json",
    ]
    levels = {"name": "math", "where": {"level": [4, 5]}}
    loaded = found(tmp_path, levels, paths=paths)
    assert ids(loaded) == ["math:train/algebra/2.json"]
    assert str(loaded.sources[0]) == "math: 1 problems of 2 rows, 1 left out by where and without"


def test_the_filtered_set_is_levels_3_to_5_of_both_splits_without_math_500(tmp_path: Path) -> None:
    rows = [
        {"problem": f"{split} level {level}?", "level": f"Level {level}", "solution": "\\boxed{1}"}
        for split in ("train", "test")
        for level in (1, 2, 3, 4, 5)
    ]
    jsonl(tmp_path / "MATH", rows[:5], "train.jsonl")
    jsonl(tmp_path / "MATH", rows[5:], "test.jsonl")
    held_out_row = {"problem": "test  level\n4?", "answer": "1", "level": 4, "unique_id": "t/1"}
    jsonl(tmp_path / "M500", [held_out_row], "test.jsonl")
    paths = {"math": "MATH", "math500": "M500"}
    loaded = found(tmp_path, "math_filtered", paths=paths)
    questions = sorted(problem.question.split("?")[0] for problem in loaded.problems)
    assert questions == [
        "test level 3",
        "test level 5",
        "train level 3",
        "train level 4",
        "train level 5",
    ]
    by_hand = {
        "name": "math",
        "split": "train+test",
        "where": {"level": [3, 4, 5]},
        "without": ["math500"],
    }
    again = found(tmp_path, by_hand, paths=paths)
    assert [problem.question for problem in again.problems] == [
        problem.question for problem in loaded.problems
    ]


def test_several_sources_keep_their_ids_apart_and_those_of_one_name_too(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        jsonl(tmp_path / folder, ROWS[:1], "rows.jsonl")
    jsonl(tmp_path, ROWS[:1], "more.jsonl")
    loaded = found(tmp_path, ["a/rows.jsonl", "b/rows.jsonl", "more.jsonl"])
    assert ids(loaded) == ["rows:r0", "rows-2:r0", "more:r0"]
    assert [problem.source for problem in loaded.problems] == ["rows", "rows-2", "more"]


def test_a_number_behind_a_name_is_none_that_another_source_has(tmp_path: Path) -> None:
    paths = ["a/math.jsonl", "a/math-3.jsonl", "b/math.jsonl", "c/math.jsonl"]
    for count, path in enumerate(paths, start=1):
        jsonl(tmp_path / Path(path).parent, ROWS[:count], Path(path).name)
    loaded = found(tmp_path, [{"path": path, "weight": 1.0} for path in paths])
    assert [(source.label, source.accepted) for source in loaded.sources] == [
        ("math", 1),
        ("math-3", 2),
        ("math-2", 3),
        ("math-4", 4),
    ]
    assert not loaded.bad


def test_a_level_that_a_table_holds_as_a_float_is_that_level(tmp_path: Path) -> None:
    levels = [3.0, None, 3.5, 4.0]
    table = pa.Table.from_pylist(
        [row | {"level": level} for row, level in zip(ROWS, levels, strict=True)]
    )
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    loaded = found(tmp_path, {"path": "rows.parquet", "where": {"level": [3, 4]}})
    assert ids(loaded) == ["r0", "r3"]
    assert ids(found(tmp_path, {"path": "rows.parquet", "where": {"level": ["3.0"]}})) == ["r0"]


def test_a_hub_dataset_comes_from_the_cache_and_without_one_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "datasets--us--ours"
    jsonl(repository / "snapshots" / ("c" * 40), ROWS, "train.jsonl")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("c" * 40)
    assert ids(found(tmp_path, "hf:us/ours")) == [row["id"] for row in ROWS]
    with pytest.raises(
        DataError, match=r"dataset 'us/none' is not .*\n.*hf download --repo-type dataset us/none"
    ):
        found(tmp_path, "hf:us/none")


def test_damaged_files_cost_their_rows_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "broken.json").write_text('{"question": ')
    (tmp_path / "odd.json").write_text('[1, {"question": "?", "answer": 2}]')
    (tmp_path / "header.csv").write_text('id,"question,answer\n1,2,3\n')
    (tmp_path / "wide.csv").write_text("question,answer\n1,2\n1,2,3\n")
    loaded = found(tmp_path, {"path": str(tmp_path)})
    assert len(loaded.problems) == 2
    assert [(row.file, row.row) for row in loaded.bad] == [
        ("broken.json", 1),
        ("broken.parquet", 1),
        ("header.csv", 1),
        ("odd.json", 1),
        ("wide.csv", 2),
    ]
    assert "the header" in loaded.bad[2].reason
    assert "3 fields, the header names 2 columns" in loaded.bad[-1].reason


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_byte_order_mark_costs_no_row(kind: str, tmp_path: Path) -> None:
    path = tmp_path / write_as(kind, tmp_path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().removeprefix(codecs.BOM_UTF8))
    loaded = found(tmp_path, path.name)
    assert ids(loaded) == [row["id"] for row in ROWS] and not loaded.bad


def run_of(folder: Path, **data: Any) -> RunConfig:
    """A run on disk whose data section is this one."""
    config = run_on_disk(folder, data=data)
    return config.model_copy(update={"data": resolve(config.data, folder)})


def test_bad_rows_are_counted_and_written_down_and_stop_a_run_only_when_asked_to(
    tmp_path: Path,
) -> None:
    jsonl(tmp_path, [ROWS[0], {"id": "x", "question": "?"}, ROWS[0], ROWS[1]], "mixed.jsonl")
    config = run_of(tmp_path, train="mixed.jsonl", eval="mixed.jsonl")
    run = Path(config.directory)
    training = problems.keep(run, *problems.read_all(config))
    assert [problem.prompt_id for problem in training] == ["r0", "r1"]
    assert problems.training(config) == training == problems.held_out(config)
    lines = (run / "bad_rows.jsonl").read_bytes().splitlines()
    bad = [msgspec.json.decode(line, type=BadRow) for line in lines]
    reasons = [(row.file, row.row, row.reason) for row in bad]
    assert reasons == 2 * [
        ("mixed.jsonl", 2, f"no column 'answer'; the row has id, question{REMEDY}"),
        ("mixed.jsonl", 3, "id 'r0' stands in mixed.jsonl row 1 already"),
    ]
    strict = run_of(tmp_path, train="mixed.jsonl", on_bad_row="stop")
    with pytest.raises(DataError, match=r"2 bad rows; repair(.|\n)*row 2: no column 'answer'"):
        problems.read_all(strict)


def test_tests_that_cannot_be_read_are_bad_rows_with_the_shapes_that_are(tmp_path: Path) -> None:
    golds = [
        '["assert f(1) == 2"]',
        "7",
        "{}",
        {"input": "1", "output": "1"},
        "assert f(1) > 2",
        " " * 900_001,
    ]
    golds += [["assert f(1) == 2", "assert f(2) == 3"]]
    jsonl(
        tmp_path,
        [{"id": n, "question": f"{n}?", "answer": gold} for n, gold in enumerate(golds)],
        "code.jsonl",
    )
    loaded = found(tmp_path, {"path": "code.jsonl", "code": "tests"})
    assert ids(loaded) == ["0", "3", "6"] and [row.row for row in loaded.bad] == [2, 3, 5, 6]
    assert all(
        "expected JSON with inputs and outputs, a list" in row.reason for row in loaded.bad[:-1]
    )
    assert "compares no call with a literal" in loaded.bad[2].reason


def test_nothing_but_bad_rows_ends_the_start_with_their_reasons(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"id": 1, "question": "?"}], "bad.jsonl")
    with pytest.raises(DataError, match=r"holds no problem: 1 rows(.|\n)*no column 'answer'"):
        found(tmp_path, "bad.jsonl")


def test_a_question_no_prompt_has_room_for_is_a_bad_row(tmp_path: Path) -> None:
    long = {"id": "long", "question": "seven " * 200, "answer": "7"}
    longest = {"id": "longest", "question": "seven " * 400, "answer": "7"}
    jsonl(tmp_path, [ROWS[0], long, longest], "long.jsonl")
    qwen(tmp_path / "q"), llama(tmp_path / "l")
    config = run_of(tmp_path, train="long.jsonl")
    section = config.rollout.model_copy(update={"max_prompt_tokens": 2000})
    target = config.scorer.model_copy(update={"max_prompt_tokens": 1000})
    models = {
        name: getattr(config, name).model_copy(update={"model": str(tmp_path / folder)})
        for name, folder in (("adapter", "q"), ("target", "l"))
    }
    config = config.model_copy(update={"rollout": section, "scorer": target} | models)
    train, _ = problems.read_all(config)
    assert ids(train) == ["r0"]
    bad_rows = [(row.file, row.row, row.reason) for row in train.bad]
    assert [bad_row[:2] for bad_row in bad_rows] == [("long.jsonl", 3), ("long.jsonl", 2)]
    assert bad_rows[0][2].endswith(
        "allowed are 1 to 2000 (the model's positions, and rollout.max_prompt_tokens)"
    )
    assert bad_rows[1][2].endswith(
        "allowed are 1 to 1000 (the model's positions, and scorer.max_prompt_tokens)"
    )


def test_every_file_is_a_part_of_what_a_run_began_with(tmp_path: Path) -> None:
    rows = [
        {"problem": f"{number}?", "level": "Level 3", "solution": "\\boxed{1}"} for number in (1, 2)
    ]
    jsonl(tmp_path / "MATH", rows, "test.jsonl")
    jsonl(tmp_path / "M500", [rows[1] | {"answer": "1", "unique_id": "t/1"}], "test.jsonl")
    paths = {"math": "MATH", "math500": "M500"}
    config = run_of(tmp_path, train=["math_filtered", {"path": "train.jsonl"}], paths=paths)
    (Path(config.directory) / "config.json").unlink()
    directory = RunDirectory(config)
    directory._lock.close()
    run_inputs = inputs(directory.path)
    assert run_inputs is not None and len(run_inputs.data_train) == 3
    excluded = tmp_path / "M500/test.jsonl"
    excluded.write_text(excluded.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"input files were others: data\.train changed"):
        RunDirectory(config)


def test_a_run_that_goes_on_keeps_the_training_problems_it_began_with(tmp_path: Path) -> None:
    jsonl(tmp_path, ROWS, "rows.jsonl")
    config = run_of(tmp_path, train="rows.jsonl")
    run = Path(config.directory)
    first = problems.keep(run, *problems.read_all(config))
    jsonl(tmp_path, ROWS[:1], "rows.jsonl")
    assert problems.keep(run, *problems.read_all(config)) == first


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        pytest.param(
            'train = "ocwcourses"',
            "data.train = 'ocwcourses': no copy is known on the hub; give its path",
            id="a set without a public copy",
        ),
        pytest.param(
            "train = {weight = 1.0}", "name and path are missing", id="neither name nor path"
        ),
        pytest.param(
            'train = {name = "mathh"}',
            'name = "mathh": not a problem set; known ones: gsm8k, math,',
            id="a misspelt name",
        ),
        pytest.param(
            'train = [{path = "t.jsonl", weight = 1.0}, "t.jsonl"]',
            "train has weights [1.0, None]",
            id="one weight of two",
        ),
        pytest.param(
            'train = "t.jsonl"\npaths = {mathh = "t.jsonl"}',
            "mathh: not a problem set",
            id="a path of an unknown set",
        ),
        pytest.param(
            'train = [{path = "t.jsonl", wait = 1.0}]',
            "data.train.0.wait: unknown key; did you mean 'weight'?",
            id="a misspelt key",
        ),
        pytest.param("train = []", "data.train", id="no set"),
        pytest.param(
            'train = "math500"\npaths = {math500 = "gone"}',
            "data.paths.math500 = 'gone': there is no such file",
            id="a path that is gone",
        ),
    ],
)
def test_a_data_section_that_cannot_be_is_refused_with_what_may(
    data: str, complaint: str, tmp_path: Path
) -> None:
    jsonl(tmp_path, ROWS, "t.jsonl")
    (tmp_path / "run.toml").write_text(
        f'directory = "run"\nadapter.model = "a/b"\ntarget.model = "a/c"\nalgorithm.iterations = 1\n[data]\n{data}\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.toml")
    assert complaint in str(caught.value)


def test_a_weight_that_trains_nothing_of_a_source_is_refused_before_the_run_begins(
    tmp_path: Path,
) -> None:
    jsonl(tmp_path, ROWS, "a.jsonl"), jsonl(tmp_path, ROWS, "b.jsonl")
    sources = [{"path": "a.jsonl", "weight": 100.0}, {"path": "b.jsonl", "weight": 0.1}]
    with pytest.raises(DataError, match=r"none of the 8 prompts of an epoch \(they get \[8, 0\]\)"):
        problems.read_all(run_of(tmp_path, train=sources))


def test_a_set_held_out_is_its_test_split_and_questions_that_are_trained_too_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"train": ("1 + 1?", "2 + 2?"), "test": ("2  +\n2?", "3 + 3?", "4 + 4?")}
    for split, questions in rows.items():
        table = pa.Table.from_pylist(
            [{"question": question, "answer": "#### 4"} for question in questions]
        )
        path = tmp_path / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pa.parquet.write_table(table, path)
    made = resolve(
        DataConfig.model_validate(
            {"train": "gsm8k", "eval": "gsm8k", "paths": {"gsm8k": "./gsm8k"}}
        ),
        tmp_path,
    )
    train, held = read(made.train, made), read(made.eval, made)
    assert (len(train.problems), len(held.problems)) == (2, 3)
    assert problems.count_shared(train.problems, held.problems) == 1
    (tmp_path / "run").mkdir()
    problems.keep(tmp_path / "run", train, held)
    assert "1 of 3 questions of data.eval are in data.train too" in caplog.text
    same = {
        "train": "gsm8k",
        "eval": {"name": "gsm8k", "split": "train"},
        "paths": {"gsm8k": "./gsm8k"},
    }
    assert (
        len(
            read((asked := resolve(DataConfig.model_validate(same), tmp_path)).eval, asked).problems
        )
        == 2
    )
