"""The letters example: its files can be rebuilt, its problems are right, and the rule of values trains it."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixrl.common.config.load import load
from prefixrl.deploy.commands.init import run_file
from prefixrl.deploy.examples.letters import build
from prefixrl.deploy.examples.letters.problems import OPERATIONS, Operation, Problem
from prefixrl.deploy.examples.letters.reward import letters_right
from support.paths import EXAMPLES, ROOT

SHIPPED = EXAMPLES / "letters"
MODELS = ("adapter", "target")
OF_THE_TASK = (
    ("data", "answer_reading"),  # follows from the reward function
    ("reward", "function"),
    ("rollout", "prefix_tokens"),
    ("scorer", "max_new_tokens"),
    ("evaluation", "fixed_prefixes"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]


def tokenizers() -> tuple[Any, Any]:
    adapter, target = (AutoTokenizer.from_pretrained(SHIPPED / name) for name in MODELS)
    return adapter, target


def rebuild(out: Path) -> Path:
    command = [sys.executable, str(SHIPPED / "build.py"), "--out", str(out), "--steps", "2"]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def test_each_operation_does_what_its_words_say() -> None:
    results = {each.words[0]: each.result("djab") for each in OPERATIONS}
    assert results == {"flip": "bajd", "swap": "jdba", "advance": "eabc", "sort": "abdj"}


def test_problem_files_ask_for_all_words_equally_and_share_no_letters() -> None:
    actual = {name: rows(name) for name in ("train", "heldout")}
    words = [word for each in OPERATIONS for word in each.words]
    for name, of_file in actual.items():
        assert [sum(row["family"] == word for row in of_file) for word in words] == [
            len(of_file) // 8
        ] * 8, name
    letters = [row["question"].split()[1] for of_file in actual.values() for row in of_file]
    assert len(set(letters)) == len(letters)
    by_word = {word: each for each in OPERATIONS for word in each.words}
    for row in actual["train"]:
        word, of_row = row["question"].split()
        assert row["answer"] == Problem(by_word[word], word, of_row).gold


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        pytest.param("Put them in order: abcd", 1.0, id="all right"),
        pytest.param("Put them in order: abdc", 0.5, id="two of four"),
        pytest.param("Put them in order: abc", 0.75, id="one is missing"),
        pytest.param("Put them in order: abcdef", 0.6666666666666666, id="two too many"),
        pytest.param("", 0.0, id="no answer"),
        pytest.param(": : bcda", 0.0, id="right letters behind colons"),
    ],
)
def test_the_reward_is_the_share_of_right_letters(answer: str, reward: float) -> None:
    assert letters_right("sort dbca", answer, "abcd") == pytest.approx(reward)


def test_the_lengths_of_the_run_file_are_those_of_the_longest_opening_and_the_longest_answer() -> (
    None
):
    config, (pieces, characters) = load(SHIPPED / "run.toml"), tokenizers()
    openings = [pieces.encode(each.opening, add_special_tokens=False) for each in OPERATIONS]
    assert config.rollout.prefix_tokens == 1 + max(map(len, openings))
    problems = [Problem(each, each.words[0], "abcd") for each in OPERATIONS]
    answers = [
        characters.encode(each.answered(each.operation), add_special_tokens=False)
        for each in problems
    ]
    assert config.scorer.max_new_tokens == 1 + max(map(len, answers))
    assert config.evaluation.fixed_prefixes == tuple(each.opening for each in OPERATIONS)


def test_no_tokenizer_reads_the_others_ids_and_families_differ() -> None:
    pieces, characters = tokenizers()
    for operation in OPERATIONS:
        assert (
            characters.decode(pieces.encode(operation.opening, add_special_tokens=False))
            != operation.opening
        )
    kinds = [
        json.loads((SHIPPED / name / "config.json").read_text())["model_type"] for name in MODELS
    ]
    assert kinds == ["gpt2", "llama"]


def test_the_run_file_is_that_of_prefixrl_init_but_for_the_tasks_own_keys(tmp_path: Path) -> None:
    adapter, target, train, heldout = (
        str(SHIPPED / name) for name in (*MODELS, "train.jsonl", "heldout.jsonl")
    )
    printed = tmp_path / "run.toml"
    printed.write_text(run_file(None, adapter, target, train, heldout))
    expected, shipped = (load(path).model_dump() for path in (printed, SHIPPED / "run.toml"))
    for rate in ("actor_lr", "critic_lr"):
        shipped["learner"][rate] *= 4
    for config in (expected, shipped):
        for section, key in OF_THE_TASK:
            config[section].pop(key)
        config.pop("directory")
        config.pop("seed")
    assert shipped == expected


@pytest.mark.nightly
def test_a_build_is_repeatable_and_makes_the_shipped_problems_tokenizers_and_shapes(
    tmp_path: Path,
) -> None:
    first, second = rebuild(tmp_path / "a"), rebuild(tmp_path / "b")
    names = [
        f"{model}/{file}" for model in MODELS for file in ("tokenizer.json", "chat_template.jinja")
    ]
    for name in ("train.jsonl", "heldout.jsonl", *names):
        assert (first / name).read_bytes() == (SHIPPED / name).read_bytes(), name
    for model in MODELS:
        one, other, shipped = (
            load_file(at / model / "model.safetensors") for at in (first, second, SHIPPED)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert {name: each.shape for name, each in one.items()} == {
            name: each.shape for name, each in shipped.items()
        }


def written(model: Any, tokenizer: Any, question: str, opening: str, max_new_tokens: int) -> str:
    """The greedy answer, the opening included."""
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt + opening, return_tensors="pt", add_special_tokens=False)["input_ids"]
    output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=max_new_tokens)
    return opening + tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def samples() -> Iterator[tuple[Operation, dict[str, str]]]:
    """Four held-out rows of each operation."""
    for operation in OPERATIONS:
        own = [row for row in rows("heldout") if row["family"] in operation.words]
        yield from ((operation, row) for row in random.Random(0).sample(own, 4))


def test_the_target_does_what_an_opening_says_and_the_right_one_gives_the_answer() -> None:
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(SHIPPED / "target").eval(),
        tokenizers()[1],
    )
    for _, row in samples():
        letters = row["question"].split()[1]
        for operation in OPERATIONS:
            said = written(target, tokenizer, row["question"], operation.opening, 8)
            assert said == f"{operation.opening} {operation.result(letters)}"


def test_the_untrained_adapter_writes_the_four_openings_whatever_the_question() -> None:
    adapter, tokenizer = (
        AutoModelForCausalLM.from_pretrained(SHIPPED / "adapter").eval(),
        tokenizers()[0],
    )
    ends = tokenizer.eos_token_id
    for _, row in samples():
        turns = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        begun = tokenizer.encode(prompt, add_special_tokens=False)
        for operation in OPERATIONS:
            opening = [*tokenizer.encode(operation.opening, add_special_tokens=False), ends]
            with torch.inference_mode():
                logits = adapter(input_ids=torch.tensor([begun + opening])).logits[
                    0, len(begun) - 1 : -1
                ]
            chance = (
                torch.log_softmax(logits.double(), -1)[range(len(opening)), opening].sum().exp()
            )
            assert 0.1 < chance < 0.5, (row["question"], operation.opening)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_daemons_train_it_by_the_rule_well_past_every_fixed_prefix(tmp_path: Path) -> None:
    flags = ["--set", f"directory={tmp_path / 'run'}", "--set", "seed=2"]
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", str(SHIPPED / "run.toml"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = json.loads((tmp_path / "run/summary.json").read_text())["accuracy"]
    assert accuracy["trained_adapter"] > accuracy["fixed_prefix"] + 0.3
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["figures"]["prefix_as_text_fraction"] > 0.9 for line in lines)


def test_the_weights_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*.safetensors")) < 2**21
    assert build.TARGET_STEPS == 500
