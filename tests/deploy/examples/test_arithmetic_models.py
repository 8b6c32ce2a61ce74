"""The arithmetic example: its files can be rebuilt, its problems are right, its target depends on how answers begin."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixrl.deploy.examples.arithmetic import build, problems

SHIPPED = Path(build.__file__).parent
MODELS = ("adapter", "target")
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
BYTE_EQUAL = (
    "heldout.jsonl",
    "train.jsonl",
    "openings.txt",
    *(f"{model}/{file}" for model in MODELS for file in ("tokenizer.json", "chat_template.jinja")),
)


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    subprocess.run(
        [sys.executable, str(SHIPPED / "build.py"), "--out", str(out), "--steps", "2"],
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return out


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHIPPED / name).read_text().splitlines()]


def described(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    content.pop("transformers_version", None)
    return content


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def continuations(
    model: Any, tokenizer: Any, prefixes: list[list[int]], **options: Any
) -> list[str]:
    """Whole answers; rows are grouped by length, so nothing is padded."""
    texts = [""] * len(prefixes)
    for length in sorted({len(prefix) for prefix in prefixes}):
        places = [place for place, prefix in enumerate(prefixes) if len(prefix) == length]
        ids = torch.tensor([prefixes[place] for place in places])
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **options
        )
        written = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        for place, text in zip(places, written, strict=True):
            texts[place] = text
    return texts


def boxed(text: str) -> str | None:
    matches = re.findall(r"\\boxed\{(\d)\}", text)
    return matches[-1] if matches else None


def worked_by_hand(question: str) -> str:
    """The gold answer from the definition of each family, without running states."""
    word, *digits = question.split()
    numbers = [int(digit) for digit in digits]
    assert len(numbers) == 8
    if word == "sum":
        return str(sum(numbers))[-1]
    if word == "largest":
        return str(sorted(numbers)[-1])
    if word == "alternate":
        plus, minus = numbers[0::2], numbers[1::2]
        return str((sum(plus) - sum(minus) + 100) % 10)
    assert word == "high"
    return str(sum(digit in "56789" for digit in digits))


@pytest.mark.parametrize(("name", "count"), [("train", 4096), ("heldout", 512)])
def test_every_shipped_answer_is_right_and_families_are_balanced(name: str, count: int) -> None:
    shipped = rows(f"{name}.jsonl")
    assert len(shipped) == len({row["id"] for row in shipped}) == count
    assert all(row["id"].startswith(f"{name}-") for row in shipped)
    assert all(row["answer"] == worked_by_hand(row["question"]) for row in shipped)
    families = [row["family"] for row in shipped]
    assert {family: families.count(family) for family in families} == {
        family.name: count // 4 for family in problems.FAMILIES
    }


def test_no_held_out_digits_occur_in_training() -> None:
    seen = [
        row["question"].split(maxsplit=1)[1] for row in rows("train.jsonl") + rows("heldout.jsonl")
    ]
    assert len(set(seen)) == len(seen)


def test_a_right_answer_is_never_luck() -> None:
    for row in rows("heldout.jsonl"):
        digits = row["question"].split(maxsplit=1)[1]
        assert len({worked_by_hand(f"{family.name} {digits}") for family in problems.FAMILIES}) == 4


def test_running_states_of_each_family_are_as_done_on_paper() -> None:
    digits = (3, 1, 4, 1, 5, 9, 2, 6)
    assert [problems.states(family, digits) for family in problems.FAMILIES] == [
        [3, 4, 8, 9, 4, 3, 5, 1],
        [3, 3, 4, 4, 5, 9, 9, 9],
        [3, 2, 6, 5, 0, 1, 3, 7],
        [0, 0, 0, 0, 1, 2, 2, 3],
    ]


@pytest.mark.nightly
def test_rebuilding_gives_the_shipped_problems_tokenizer_and_configs(rebuilt: Path) -> None:
    for name in BYTE_EQUAL:
        assert (rebuilt / name).read_bytes() == (SHIPPED / name).read_bytes(), name
    for model in MODELS:
        for folder in (rebuilt / model, SHIPPED / model):
            assert {path.name for path in folder.iterdir()} == MODEL_FILES
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert described(rebuilt / model / name) == described(SHIPPED / model / name), name


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_rebuilt_weights_load_and_have_the_shipped_shapes(rebuilt: Path, model: str) -> None:
    tensors, shipped = (
        load_file(folder / model / "model.safetensors") for folder in (rebuilt, SHIPPED)
    )
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in shipped.items()
    }
    assert {tensor.dtype for tensor in shipped.values()} == {torch.float32}
    loaded, tokenizer = load(rebuilt / model)
    ids = torch.tensor([prompt(tokenizer, "sum 3 1 4 1 5 9 2 6")])
    assert torch.isfinite(loaded(input_ids=ids).logits).all()


@pytest.mark.parametrize("model", MODELS)
def test_generation_configs_carry_special_tokens_and_no_sampling(model: str) -> None:
    assert set(described(SHIPPED / model / "generation_config.json")) <= {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }


def test_text_and_tokens_agree_both_ways() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "target")
    problem = problems.Problem(problems.FAMILIES[0], (3, 1, 4, 1, 5, 9, 2, 6))
    assert problem.worked(0) == r"Let us add them up: 3 4 8 9 4 3 5 1 so \boxed{1}"
    for number, opening in enumerate(problems.OPENINGS):
        ids = tokenizer.encode(opening)
        worked = tokenizer.encode(problem.worked(number))
        assert len(ids) < build.K_TOKENS and worked[: len(ids)] == ids
        assert tokenizer.decode(ids) == opening
        assert tokenizer.decode(worked) == problem.worked(number)
        assert tokenizer.unk_token_id not in worked
        assert len(worked) + 1 <= build.ANSWER_TOKENS
    assert (SHIPPED / "openings.txt").read_text().splitlines() == list(problems.OPENINGS)


def test_the_chat_template_leaves_the_answer_to_be_begun() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "adapter")
    expected = ["<|user|>", "sum", *"31415926", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens(prompt(tokenizer, "sum 3 1 4 1 5 9 2 6")) == expected


@pytest.mark.slow
def test_the_target_follows_the_opening_and_only_the_right_one_helps() -> None:
    model, tokenizer = load(SHIPPED / "target")
    shipped = rows("heldout.jsonl")

    def shares(prefix: list[int], **options: Any) -> dict[str, float]:
        texts = continuations(
            model,
            tokenizer,
            [prompt(tokenizer, row["question"]) + prefix for row in shipped],
            **options,
        )
        right: dict[str, list[bool]] = {}
        for row, text in zip(shipped, texts, strict=True):
            right.setdefault(row["family"], []).append(boxed(text) == row["answer"])
        assert all(len(verdicts) >= 64 for verdicts in right.values())
        return {family: sum(verdicts) / len(verdicts) for family, verdicts in right.items()}

    for number, opening in enumerate(problems.OPENINGS):
        prefix = tokenizer.encode(opening)
        for family, share in shares(prefix, do_sample=False).items():
            if family == problems.FAMILIES[number].name:
                assert share >= 0.97, (family, opening)
            else:
                assert share <= 0.25, (family, opening)
        torch.manual_seed(0)
        sampled = shares(prefix, do_sample=True, temperature=0.7, top_k=0, top_p=1.0)
        assert sampled[problems.FAMILIES[number].name] >= 0.95
    alone = shares([], do_sample=False)
    assert sum(alone.values()) / len(alone) <= 0.7


def test_the_adapter_knows_openings_and_leans_towards_the_right_one() -> None:
    model, tokenizer = load(SHIPPED / "adapter")
    openings = [
        [*tokenizer.encode(opening), tokenizer.eos_token_id] for opening in problems.OPENINGS
    ]
    shipped = rows("heldout.jsonl")[:128]
    for row in shipped:
        start = prompt(tokenizer, row["question"])
        chances = [chance(model, start, opening) for opening in openings]
        right = [family.name for family in problems.FAMILIES].index(row["family"])
        assert sum(chances) >= 0.98
        assert chances[right] >= 0.15
        assert right == 0 or chances[0] >= 2 * chances[right]
        assert (
            max(chances) == chances[0]
        )  # greedy, it writes the habitual opening whatever the question


@torch.inference_mode()
def chance(model: Any, start: list[int], written: list[int]) -> float:
    """Probability that the model continues `start` with exactly `written`."""
    logits = model(input_ids=torch.tensor([start + written])).logits[0, len(start) - 1 : -1]
    table = torch.log_softmax(logits.double(), dim=-1)
    return math.exp(sum(table[place, token].item() for place, token in enumerate(written)))
