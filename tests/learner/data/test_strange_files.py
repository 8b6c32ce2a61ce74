"""Files as strangers have them: golds within a text, conversations, choices, packed files, values of every kind."""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from prefixrl.common.config.data import DataConfig, resolve
from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.learner.data.problems import Loaded, keep, read
from support.models.chat_tokenizers import qwen
from support.rows import jsonl

SOLUTION = "Ann has 3 boxes of 400 pins: 3*400=<<3*400=1200>>1200.\n#### 1,200"
TURNS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
EARLIER = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def loaded(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> Loaded:
    jsonl(folder, rows, "rows.jsonl")
    return of_file(folder / "rows.jsonl", **keys)


def of_file(path: Path, **keys: Any) -> Loaded:
    data = resolve(DataConfig.model_validate({"train": [{"path": str(path)} | keys]}), path.parent)
    return read(data.train, data)


def told(loaded: Loaded) -> str:
    return "\n".join([str(loaded.sources[0]), *loaded.sources[0].warnings, *map(str, loaded.bad)])


@pytest.mark.parametrize(
    ("columns", "gold", "read_as"),
    [
        ({"question": "?", "answer": SOLUTION}, "1200", "'question' = 'answer' (after_hashes)"),
        (
            {"problem": "?", "solution": "So\nit is \\boxed{6}."},
            "6",
            "'problem' = 'solution' (last_box)",
        ),
        ({"question": "?", "answer": "9 (red apples)"}, "9", "'question' = 'answer' (before_unit)"),
        ({"input": "?", "target": 43.0}, "43.0", "'input' = 'target'"),
        ({"Question": "?", "Answer": 145.0}, "145.0", "'Question' = 'Answer'"),
    ],
)
def test_the_gold_within_an_answer_is_guessed_and_the_guess_is_told(
    columns: dict[str, Any], gold: str, read_as: str, tmp_path: Path
) -> None:
    actual = loaded(tmp_path, [columns | {"question_id": number} for number in range(20)])
    assert {problem.gold for problem in actual.problems} == {gold}
    assert f"20 rows, read as {read_as}" in told(actual)
    whole = loaded(tmp_path, [columns], answer_reading="as_it_is")
    assert (
        whole.problems[0].gold == str(list(columns.values())[1]) and not whole.sources[0].warnings
    )


def test_golds_that_no_answer_meets_are_counted_over_all_rows_with_the_key_that_mends_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [SOLUTION, "It is \\boxed{3}.", "15 (balls)", "You\nget 4."]
    rows = [
        {"question": f"{number}?", "answer": gold} for number, gold in enumerate(["6"] * 40 + texts)
    ]
    actual = loaded(tmp_path, rows)
    for reading in ("after_hashes", "last_box", "before_unit", "last_number"):
        (line,) = (
            warning
            for warning in actual.sources[0].warnings
            if f'answer_reading = "{reading}"' in warning
        )
        assert line.startswith("1 of 44 gold answers ")
    keep(tmp_path, actual, actual)
    assert (
        "rows: 1 of 44 gold answers end with a unit in brackets, for example '15 (balls)'"
        in caplog.text
    )
    assert loaded(tmp_path, rows[-1:], answer_reading="last_number").problems[0].gold == "4"


def test_a_gold_that_only_looks_like_one_with_a_unit_is_left_alone(tmp_path: Path) -> None:
    golds = ["2 (x+1)", "(1, 2)", "f(x)", "3(a)", "5:6"]
    actual = loaded(tmp_path, [{"question": f"{gold}?", "answer": gold} for gold in golds])
    assert [problem.gold for problem in actual.problems] == golds and not actual.sources[0].warnings


def test_a_reward_function_gets_golds_as_they_are(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"question": "?", "answer": SOLUTION}], "rows.jsonl")
    (tmp_path / "own.py").write_text("def reward(question, answer, gold):\n    return 1.0\n")
    run = 'directory = "run"\nadapter.model = "a/b"\ntarget.model = "a/c"\ndata.train = "rows.jsonl"\n'
    (tmp_path / "run.toml").write_text(
        f"{run}algorithm.iterations = 1\nreward.function = 'own.py:reward'\n"
    )
    data = load(tmp_path / "run.toml").data
    assert read(data.train, data).problems[0].gold == SOLUTION


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TURNS, "reward_model": {"style": "rule", "ground_truth": "4"}},  # verl
        {
            "prompt": json.dumps(TURNS),
            "reward_model": json.dumps({"ground_truth": "4"}),
        },  # its columns as text
        {"prompt": str(TURNS), "reward_model": str({"ground_truth": "4"})},
        {"prompt": TURNS, "solution": "4"},  # TRL, and OpenRLHF with another name for the answer
        {"prompt": TURNS, "completion": [{"role": "assistant", "content": "4"}]},
        {"messages": [*TURNS, {"role": "assistant", "content": "Let me see."}], "label": "4"},
        {
            "conversations": [
                {"from": "system", "value": "Be short."},
                {"from": "human", "value": "2 + 2?"},
            ],
            "gold": 4,
        },
        {
            "prompt": [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS
            ],
            "answer": "4",
        },
    ],
)
def test_conversations_are_read_as_they_are(row: dict[str, Any], tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, [row]).problems
    assert (problem.system, problem.question, problem.gold) == ("Be short.", "2 + 2?", "4")
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert of_file(tmp_path / "rows.parquet", keep_system=False).problems[0].system == ""


def test_earlier_turns_are_asked_as_turns(tmp_path: Path) -> None:
    row = {"prompt": [TURNS[0], *EARLIER, TURNS[1]], "answer": "4"}
    prompt = loaded(tmp_path, [row]).problems[0].prompt()
    renderer = Renderer(str(qwen(tmp_path / "qwen")), 4096)
    text = renderer.decode_with_special(
        renderer.prompt(prompt.question, prompt.system, prompt.earlier)
    )
    said = ["system\nBe short.", "user\n1 + 1?", "assistant\n2", "user\n2 + 2?"]
    assert (
        text
        == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in said) + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"role": "assistant", "content": "4"}], "expected turns, one of them the user's"),
        (
            [{"role": "tool", "content": "4"}, TURNS[1]],
            "expected a role of system, user, assistant",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "and text as content"),
    ],
)
def test_a_conversation_that_cannot_be_asked_is_a_bad_row(
    turns: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=reason):
        loaded(tmp_path, [{"prompt": turns, "answer": "4"}])


@pytest.mark.parametrize(
    ("row", "template", "question"),
    [
        ({"Body": "Of 6 eat 2.", "Question": "Left?"}, "{Body} {Question}", "Of 6 eat 2. Left?"),
        (
            {"question": "2 + 2?", "options": ["A)3", "B)4"]},
            "{question}\n{options}",
            "2 + 2?\nA)3\nB)4",
        ),
        (
            {"question": "2 + 2?", "options": ["3", "4"]},
            "{question}\n{options}",
            "2 + 2?\nA) 3\nB) 4",
        ),
        (
            {"question": "2 + 2?", "options": {"A": "3", "B": "4"}},
            "{question}\n{options}",
            "2 + 2?\nA) 3\nB) 4",
        ),
        (
            {"question": "2?", "choices": {"text": [3], "label": ["1"]}},
            "{question}\n{choices}",
            "2?\n1) 3",
        ),
        (
            {"context": None, "question": "2 + 2?"},
            "{context}\n\n{question} \\boxed{}",
            "2 + 2? \\boxed{}",
        ),
    ],
)
def test_a_template_makes_a_question_of_several_columns(
    row: dict[str, Any], template: str, question: str, tmp_path: Path
) -> None:
    (problem,) = loaded(tmp_path, [row | {"correct": "B"}], question_template=template).problems
    assert (problem.question, problem.gold) == (question, "B")
    without = told(loaded(tmp_path, [row | {"correct": "B"}]))
    assert ("columns that are not asked" in without) == (None not in row.values())


def test_a_template_without_a_column_or_beside_a_question_column_or_with_a_wrong_name_is_refused(
    tmp_path: Path,
) -> None:
    for keys, reason in (
        ({"question_template": "no place"}, "names no column"),
        (
            {"question_template": "{question}", "question_column": "q"},
            "question_column names the question too",
        ),
        (
            {"question_template": "{stem} {question}"},
            "no column 'stem'; the row has answer, question",
        ),
    ):
        with pytest.raises((ValueError, DataError), match=reason):
            loaded(tmp_path, [{"question": "?", "answer": "4"}], **keys)


def test_a_checkout_of_gsm8k_is_read_once_and_its_count_compared(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in (split, f"{split}_socratic"):
            jsonl(
                tmp_path / "gsm8k", [{"question": f"{split}?", "answer": SOLUTION}], f"{name}.jsonl"
            )
    jsonl(
        tmp_path / "gsm8k",
        [{"question": "?", "ground_truth": "A: 18"}],
        "example_model_solutions.jsonl",
    )
    paths = {"paths": {"gsm8k": "./gsm8k"}}
    data = resolve(DataConfig.model_validate({"train": "gsm8k", "eval": "gsm8k"} | paths), tmp_path)
    for sources, published in ((data.train, 7473), (data.eval, 1319)):
        content = read(sources, data)
        assert len(content.problems) == 1
        assert content.sources[0].warnings == [
            f"1 problems, {published} are published: other files, or bad rows?"
        ]
    chosen = resolve(
        DataConfig.model_validate(
            {"train": {"name": "gsm8k", "where": {"question": ["train?"]}}} | paths
        ),
        tmp_path,
    )
    assert not read(chosen.train, chosen).sources[0].warnings


def test_a_question_that_comes_again_is_counted_with_its_other_golds(tmp_path: Path) -> None:
    rows = [
        {"question": text, "answer": gold}
        for text, gold in (("a 1", 3), ("a 1", 4), ("a  1", 3), ("b", 3))
    ]
    assert "2 problems repeat a question, 1 of them with another gold answer" in told(
        loaded(tmp_path, rows)
    )
    contexts = [
        {"prompt": [*EARLIER[:1], *last, TURNS[1]], "answer": "4"} for last in (EARLIER[1:], [])
    ]
    assert "repeat" not in told(loaded(tmp_path, contexts))


def test_a_folder_in_another_layout_than_the_set_s_names_the_way_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "olympiadbench", [{"question": "?", "final_answer": ["4"]}], "test.jsonl")
    with pytest.raises(
        DataError,
        match=r"It has test\.jsonl; where one of these holds the problems, give it as path",
    ):
        of_file(tmp_path / "olympiadbench", name="olympiadbench")
    assert (
        of_file(tmp_path / "olympiadbench/test.jsonl", name="olympiadbench").problems[0].gold == "4"
    )


def test_the_kind_of_a_file_is_known_by_its_suffix_in_any_case_and_packed(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = (
        "question,answer\n" + "".join(f"{number} + 1?,{number + 1}\n" for number in range(3))
    ).encode()
    files = {
        "a.jsonl.gz": gzip.compress(lines),
        "b.JSONL": lines,
        "c.CSV": table,
        "d.tsv": table.replace(b",", b"\t"),
        "e.json": lines,
        "f.jsonl.zst": zstandard.compress(lines),
        "g.csv.GZ": gzip.compress(table),
        "h.json.gz": gzip.compress(json.dumps(rows).encode()),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert [problem.gold for problem in of_file(tmp_path / name).problems] == ["1", "2", "3"], (
            name
        )
    assert len(of_file(tmp_path).problems) == 3 * len(files)
    for name, content in {
        "x.jsonl.gz": lines,
        "y.jsonl.zst": lines,
        "z.jsonl.gz": gzip.compress(lines)[:-9],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"cannot read .*{name}"):
            of_file(tmp_path / name)
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"rows\.xlsx is a file of no known kind; known: \.jsonl"):
        of_file(tmp_path / "rows.xlsx")


def test_values_of_every_kind_are_read_or_named(tmp_path: Path) -> None:
    golds = {"8.00": Decimal("8.00"), "8": b"8", "7": ["7"], "6": 6, "bad": b"\xff", "bool": True}
    for kind, gold in golds.items():
        pa.parquet.write_table(
            pa.table({"question": ["?"], "answer": [gold]}), tmp_path / f"{kind}.parquet"
        )
    for kind in list(golds)[:4]:
        assert of_file(tmp_path / f"{kind}.parquet").problems[0].gold == kind
    for kind, reason in (("bad", "byte 0xff"), ("bool", "is True; expected text or a number")):
        with pytest.raises(DataError, match=reason):
            of_file(tmp_path / f"{kind}.parquet")


def test_a_row_without_an_id_has_its_number_and_a_missing_word_is_no_gold(tmp_path: Path) -> None:
    rows = [{"id": None}, {"id": ""}, {"id": "x"}]
    actual = loaded(tmp_path, [row | {"question": "?", "answer": "4"} for row in rows])
    assert [problem.prompt_id for problem in actual.problems] == ["1", "2", "x"]
    words = ["None", "nan", "NULL", "N/A", "Na", "none of these", "6"]
    actual = loaded(tmp_path, [{"question": "?", "answer": word} for word in words])
    assert [problem.gold for problem in actual.problems] == words[4:]
    assert (
        len(
            loaded(
                tmp_path, [{"question": "?", "answer": "None"}], answer_reading="as_it_is"
            ).problems
        )
        == 1
    )


def test_a_gguf_file_as_a_model_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    jsonl(tmp_path, [{"question": "?", "answer": "4"}], "rows.jsonl")
    run = 'directory = "run"\nadapter.model = "model.gguf"\ndata.train = "rows.jsonl"\nalgorithm.iterations = 1\n'
    (tmp_path / "run.toml").write_text(f'{run}target.model = "a/c"\n')
    with pytest.raises(
        ConfigError, match="is a file; give a Hugging Face folder; a GGUF file must be converted"
    ):
        load(tmp_path / "run.toml")
