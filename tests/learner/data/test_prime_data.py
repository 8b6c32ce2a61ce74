r"""PRIME's data and prompts: rows as Eurus-2-RL-Data has them, from a Parquet file to the reward of an answer.

The rows are our own, in the published columns: a conversation of a system and a user turn, a kind, the way of judging
with its gold answer as text (for coding tasks JSON with inputs and outputs), and where the row comes from.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from prefixrl.common.config.data import TASK_SUFFIXES, DataConfig, resolve
from prefixrl.common.config.prompting import ModelConfig
from prefixrl.common.errors import DataError
from prefixrl.common.prompts.rendering import Renderer
from prefixrl.common.wire.messages.groups import TextVerdict
from prefixrl.learner.data.problems import Problem, read
from prefixrl.scorer.verifier.pool import VerifierPool
from support.models.chat_tokenizers import qwen
from support.rows import jsonl

PATIENCE_S = 240.0
SCAFFOLD = "\nWork in the actions that you were taught.\n\n[LOOK]\n\n[DO]\n"
MATHS, CODE = TASK_SUFFIXES["prime"]


def row(source: str, ability: str, question: str, truth: str, index: int) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": SCAFFOLD}, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index},
    }


def judged_by(inputs: list[Any], outputs: list[Any], name: str | None = None) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs} | ({"fn_name": name} if name else {}))


ABSOLUTE = (
    [f"{number}\n" for number in range(-6, 6)],
    [f"{abs(number)}\n" for number in range(-6, 6)],
)
ROWS = [
    row("numina_synthetic_math", "math", f"What is half of 7?{MATHS}", "\\frac{7}{2}", 0),
    row(
        "codecontests",
        "code",
        f"Read a number and print its absolute value.{CODE}",
        judged_by(*ABSOLUTE),
        1,
    ),
    row(
        "taco",
        "code",
        f"Write `total(a, b)`.{CODE}",
        judged_by([[1, 2], [0, 5], [-4, 4]], [3, 5, 0], "total"),
        2,
    ),
    row(
        "apps",
        "code",
        f"Write `total(a, b)`.{CODE}",
        judged_by(["1\n2", "3\n4"], [[3], [7]], "total"),
        3,
    ),
]


def fenced(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


SUM = fenced("def total(a, b):\n    return a + b")
METHOD = fenced("class Solution:\n    def total(self, a, b):\n        return a + b")
ANSWERS: list[tuple[int, str, float]] = [
    (0, "So it is \\boxed{3.5}.", 1.0),
    (0, "So it is \\boxed{7}.", 0.0),
    (1, fenced("print(abs(int(input())))"), 1.0),
    # Of the first ten tests (-6 to 3), those at 0 and above.
    (1, fenced("print(int(input()))"), 0.4),
    (1, "```python\nprint(0)\n```\nNo:\n" + fenced("print(abs(int(input())))"), 1.0),
    (1, "I would take the absolute value.", 0.0),
    (2, SUM, 1.0),
    (2, METHOD, 1.0),
    (2, fenced("def total(a, b):\n    return b"), 1 / 3),
    (2, fenced("def total(a, b):\n    return a / 0"), 0.0),
    (3, SUM, 1.0),
]


def problems(folder: Path, **keys: Any) -> list[Problem]:
    file = folder / "eurus/data/train-00000-of-00001.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), file)
    source = {"name": "eurus2_rl", "path": str(folder / "eurus"), **keys}
    data = resolve(DataConfig.model_validate({"train": source}), folder)
    content = read(data.train, data)
    assert not content.bad
    return content.problems


def verdicts(pool: VerifierPool, tasks: list[Problem]) -> list[TextVerdict]:
    for key, (number, text, _) in enumerate(ANSWERS):
        task = tasks[number]
        pool.submit(key, text, task.gold, task.question, task.code)
    result, deadline_s = {}, time.monotonic() + PATIENCE_S
    while pool.pending:
        assert time.monotonic() < deadline_s, f"{pool.pending} answers are still pending"
        pool.wait(1.0)
        result |= dict(pool.poll())
    return [result[key] for key in range(len(ANSWERS))]


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    verifiers = VerifierPool(1, 20)
    yield verifiers
    verifiers.close()


@pytest.mark.slow
def test_the_reward_of_a_program_is_the_share_of_the_first_ten_tests_that_it_passes(
    pool: VerifierPool, tmp_path: Path
) -> None:
    for (number, text, reward), actual in zip(
        ANSWERS, verdicts(pool, problems(tmp_path)), strict=True
    ):
        assert actual.status in ("ok", "no_answer"), (number, text, actual)
        assert actual.reward == pytest.approx(reward), (number, text, actual)


def test_questions_kinds_and_sources_are_those_of_the_rows(tmp_path: Path) -> None:
    actual = problems(tmp_path)
    assert [problem.question for problem in actual] == [
        problem["prompt"][1]["content"] for problem in ROWS
    ]
    assert [problem.code for problem in actual] == ["none", "tests", "tests", "tests"]
    assert [problem.family for problem in actual] == [problem["data_source"] for problem in ROWS]
    only = problems(tmp_path, where={"ability": ["math"]})
    assert [problem.gold for problem in only] == ["\\frac{7}{2}"]


def test_the_system_turn_is_left_out_unless_it_is_kept_and_that_of_the_run_file_replaces_it(
    tmp_path: Path,
) -> None:
    without, kept = problems(tmp_path)[0], problems(tmp_path, keep_system=True)[0]
    assert (without.system, kept.system) == ("", SCAFFOLD)
    model = str(qwen(tmp_path / "qwen"))

    def text(model_config: ModelConfig, problem: Problem) -> str:
        renderer = Renderer(model, 4096, model_config)
        prompt = problem.prompt()
        return renderer.decode_with_special(renderer.prompt(prompt.question, prompt.system))

    plain, own = ModelConfig(model=model), ModelConfig(model=model, system="Be short.")
    assert f"<|im_start|>system\n{SCAFFOLD}<|im_end|>\n<|im_start|>user\n{kept.question}" in text(
        plain, kept
    )
    assert "[LOOK]" not in text(plain, without)
    assert text(own, kept) == text(own, without)
    assert "<|im_start|>system\nBe short.<|im_end|>" in text(own, kept)
    bare = ModelConfig(model=model, chat_template=False)
    assert text(bare, kept) == f"{SCAFFOLD}\n\n{kept.question}"


def test_prompts_of_both_kinds_are_added_to_data_that_has_none(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"id": 1, "question": "Half of 7?", "answer": "3.5"}], "own.jsonl")
    jsonl(
        tmp_path,
        [{"id": 1, "question": "Print 1.", "answer": judged_by([""], ["1"])}],
        "tasks.jsonl",
    )
    sources = [
        {"path": "own.jsonl", "task_suffix": "prime"},
        {
            "path": "tasks.jsonl",
            "task_suffix": "prime",
            "code": "tests",
            "suffix": "\n(stdin is empty)",
        },
    ]
    data = resolve(DataConfig.model_validate({"train": sources}), tmp_path)
    maths, code = (problem.question for problem in read(data.train, data).problems)
    assert maths == "Half of 7?\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
    assert code.startswith("Print 1.\n(stdin is empty)\n\nWrite Python code to solve the problem.")
    assert code.endswith("```python\nYour code\n```\nat the end.")


def test_a_question_is_left_out_of_a_set_whatever_is_written_behind_it(tmp_path: Path) -> None:
    jsonl(
        tmp_path,
        [{"id": n, "question": f"Half of {n}?", "answer": n / 2} for n in (1, 2)],
        "own.jsonl",
    )
    jsonl(tmp_path, [{"id": 1, "question": "Half of 2?", "answer": 1}], "eval.jsonl")
    source = {
        "path": "own.jsonl",
        "task_suffix": "prime",
        "without": [{"path": "eval.jsonl", "task_suffix": "prime"}],
    }
    data = resolve(DataConfig.model_validate({"train": source}), tmp_path)
    assert [problem.gold for problem in read(data.train, data).problems] == ["0.5"]


def test_a_system_turn_cannot_be_kept_of_rows_that_have_none(tmp_path: Path) -> None:
    jsonl(tmp_path, [{"question": "Half of 2?", "answer": 1}], "own.jsonl")
    data = resolve(
        DataConfig.model_validate({"train": {"path": "own.jsonl", "keep_system": True}}), tmp_path
    )
    with pytest.raises(
        DataError, match=r"keep_system has no effect: no row of .*own\.jsonl has a system turn"
    ):
        read(data.train, data)
