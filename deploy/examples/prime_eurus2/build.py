"""Build the tiny form of the PRIME example: rows in the columns of Eurus-2-RL-Data, and a policy that can answer them.

    python deploy/examples/prime_eurus2/build.py [--out DIR] [--steps N] [--seed S]

Three kinds of task, each about one of four operations on two numbers: a value (in a box), a program that reads stdin,
or a function. Questions end with PRIME's own words, and every row has a system turn. The policy is
taught to do what was asked for on half of the rows, and one of the other operations on the rest, for a few minutes: its
programs run, but most do the wrong thing, and values are often wrong. Wrong programs pass some tests, so that their
rewards are shares.

The result is the same on every run with one thread on one type of CPU.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixrl.common.config.data import TASK_SUFFIXES
from prefixrl.deploy.examples.arithmetic.build import IGNORED, Shape, make_model, train
from prefixrl.deploy.examples.builder import begin, command_of, save

POLICY = Shape(hidden=64, layers=2, heads=2)
RIGHT = 0.5
"""Share of the taught answers that do what was asked; the others do one of the other operations."""
SCAFFOLD = "Look at the task, then write the answer."
BATCH_ROWS = 64
TESTS = 2
VALUES = 5
"""Numbers below this are asked for."""
COPIES = 6
"""Rows with one coding question, each with tests of its own."""
PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + EOS + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PIECE = r"```| ?[A-Za-z]+|[0-9]|\\boxed|\s|[^\sA-Za-z0-9]"

Kind = Literal["value", "stdin", "function"]
KINDS: tuple[Kind, ...] = ("value", "stdin", "function")
OPERATIONS = {"sum": "a + b", "product": "a * b", "larger": "max(a, b)", "smaller": "min(a, b)"}


@dataclass(frozen=True)
class Task:
    """One question. `a` and `b` are its numbers where a value is asked for, else those of nothing."""

    kind: Kind
    operation: str
    a: int = 0
    b: int = 0

    @property
    def question(self) -> str:
        """The user's turn, with PRIME's words behind the task."""
        maths, code = TASK_SUFFIXES["prime"]
        if self.kind == "value":
            return f"What is the {self.operation} of {self.a} and {self.b}?{maths}"
        begin = "Read a and b, print" if self.kind == "stdin" else "Write solve(a, b) that returns"
        return f"{begin} their {self.operation}.{code}"

    def answer(self, operation: str) -> str:
        """Return a whole answer that carries out this operation."""
        if self.kind == "value":
            return f"The {operation} of {self.a} and {self.b} is \\boxed{{{value(operation, self.a, self.b)}}}"
        expression = OPERATIONS[operation]
        lines = ["def solve(a, b):", f"    return {expression}"]
        if self.kind == "stdin":
            lines = ["a, b = map(int, input().split())", f"print({expression})"]
        return "\n".join(["```python", *lines, "```"])

    def row(self, rng: random.Random, split: str, index: int) -> dict[str, object]:
        """Return the row that asks for it, with tests on drawn numbers."""
        pairs = [(rng.randrange(1, 10), rng.randrange(1, 10)) for _ in range(TESTS)]
        results = [value(self.operation, a, b) for a, b in pairs]
        truth = str(value(self.operation, self.a, self.b))
        if self.kind == "stdin":
            truth = json.dumps(
                {
                    "inputs": [f"{a} {b}\n" for a, b in pairs],
                    "outputs": [f"{each}\n" for each in results],
                }
            )
        elif self.kind == "function":
            truth = json.dumps({"fn_name": "solve", "inputs": pairs, "outputs": results})
        return {
            "data_source": f"tiny_{self.kind}",
            "prompt": [
                {"role": "system", "content": SCAFFOLD},
                {"role": "user", "content": self.question},
            ],
            "ability": "math" if self.kind == "value" else "code",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index},
        }


def value(operation: str, a: int, b: int) -> int:
    """Carry out an operation."""
    return {"sum": a + b, "product": a * b, "larger": max(a, b), "smaller": min(a, b)}[operation]


def tasks(rng: random.Random) -> list[Task]:
    """Every value once and every coding task a few times, in an order of chance."""
    numbers = range(VALUES)
    rows = [
        Task("value", operation, a, b) for operation in OPERATIONS for a in numbers for b in numbers
    ]
    for kind in KINDS[1:]:
        rows += [Task(kind, operation) for operation in OPERATIONS for _ in range(COPIES)]
    rng.shuffle(rows)
    return rows


def make_tokenizer(every: Sequence[Task]) -> PreTrainedTokenizerFast:
    """A token per word with the space before it, digit, mark and white space: texts come back to the letter."""
    texts = [
        SCAFFOLD,
        *(task.question + "\n" + task.answer(name) for task in every for name in OPERATIONS),
    ]
    pieces = sorted({piece for text in texts for piece in re.findall(_PIECE, text)})
    vocabulary = {
        token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *ROLES, *pieces])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=128,
    )


def lessons(every: Sequence[Task], rng: random.Random) -> Iterator[Task]:
    """Endless tasks, as many of each kind."""
    by_kind = [[task for task in every if task.kind == kind] for kind in KINDS]
    while True:
        yield from (rng.choice(of_kind) for of_kind in by_kind)


def batches(
    tokenizer: PreTrainedTokenizerFast, every: Sequence[Task], rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), both (rows, tokens) int64, padded on the right; answers are labelled."""
    stream = lessons(every, rng)
    while True:
        rows = []
        for _ in range(BATCH_ROWS):
            task = next(stream)
            others = [name for name in OPERATIONS if name != task.operation]
            done = task.operation if rng.random() < RIGHT else rng.choice(others)
            turns = [
                {"role": "system", "content": SCAFFOLD},
                {"role": "user", "content": task.question},
            ]
            prompt = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
            written = tokenizer.encode(task.answer(done), add_special_tokens=False)
            rows.append(
                (
                    tokenizer.encode(prompt, add_special_tokens=False),
                    [*written, tokenizer.eos_token_id],
                )
            )
        longest = max(len(prompt) + len(written) for prompt, written in rows)
        ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for number, (given, written) in enumerate(rows):
            ids[number, : len(given) + len(written)] = torch.tensor(given + written)
            labels[number, len(given) : len(given) + len(written)] = torch.tensor(written)
        yield ids, labels


def build(out: Path, steps: int, seed: int) -> None:
    """Write `data/train.jsonl`, `data/validation.jsonl` and the policy to `out`."""
    begin(seed)
    rng = random.Random(f"{seed} tasks")
    every = tasks(rng)
    (out / "data").mkdir(parents=True, exist_ok=True)
    held_out = len(every) // 5
    for split, own in (("validation", every[:held_out]), ("train", every[held_out:])):
        rows = [task.row(rng, split, index) for index, task in enumerate(own)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    tokenizer = make_tokenizer(every)
    policy = make_model(POLICY, tokenizer)
    train(policy, batches(tokenizer, every, random.Random(f"{seed} answers")), steps)
    save(policy, tokenizer, out / "policy")


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 400)()
