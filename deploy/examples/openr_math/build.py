"""Build the process reward model of the tiny form: a small causal model that says whether a step is good.

    python deploy/examples/openr_math/build.py [--out DIR] [--steps N] [--seed S]

It reads as Math-Shepherd does: question, a space, then each step with the tag behind it; the next token after the tag
is + or -. Tokenizer and worked answers are those of `deploy/examples/arithmetic`: an answer's first step is its
procedure, the second its box. Of the taught answers half are right. The others carry out another procedure, where both
steps are bad, or leave the box empty, where only the second is.

The result is the same on every run with one thread on one type of CPU.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from prefixrl.deploy.examples.arithmetic.build import (
    IGNORED,
    Shape,
    make_model,
    make_tokenizer,
    train,
)
from prefixrl.deploy.examples.arithmetic.problems import FAMILIES, Problem, stream
from prefixrl.deploy.examples.builder import begin, command_of, save

MODEL = Shape(hidden=64, layers=2, heads=2)
TAG, GOOD, BAD = "ки", "+", "-"
SEPARATOR = " so "
"""Text between the two steps of an answer."""
BATCH_PAIRS = 16

Lesson = tuple[str, str, list[int]]
"""Question, answer, and the label of each step: 1 is good."""


def tagged_tokenizer() -> PreTrainedTokenizerFast:
    """The example's tokenizer, with a tag and two candidates."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([TAG, GOOD, BAD])
    return tokenizer


def lessons(rng: random.Random) -> Iterator[tuple[Lesson, Lesson]]:
    """Endless pairs of a right answer and a corrupted one to the same question."""
    for problem in stream(rng, set()):
        right = FAMILIES.index(problem.family)
        wrong, labels = _corrupted(problem, right, rng)
        yield (problem.question, problem.worked(right), [1, 1]), (problem.question, wrong, labels)


def _corrupted(problem: Problem, right: int, rng: random.Random) -> tuple[str, list[int]]:
    if rng.random() < 0.5:  # another procedure, carried out without a fault
        return problem.worked(
            rng.choice([each for each in range(len(FAMILIES)) if each != right])
        ), [0, 0]
    head, _, _ = problem.worked(right).rpartition("{")
    return f"{head}{{}}", [1, 0]  # nothing in the box


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), both (rows, tokens) int64, padded on the right; what follows a tag is labelled."""
    tag, good, bad = (tokenizer.get_vocab()[each] for each in (TAG, GOOD, BAD))
    pairs = lessons(random.Random(seed))
    while True:
        rows = [lesson for _ in range(BATCH_PAIRS) for lesson in next(pairs)]
        texts = [
            f"{question} " + "".join(f"{step} {TAG}\n" for step in answer.split(SEPARATOR))
            for question, answer, _ in rows
        ]
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        # One column more: the label of a row that ends with its tag.
        ids = torch.full((len(rows), 1 + max(map(len, encoded))), tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for number, (own, (_, _, of_steps)) in enumerate(zip(encoded, rows, strict=True)):
            ids[number, : len(own)] = torch.tensor(own)
            after = [place + 1 for place, token in enumerate(own) if token == tag]
            labels[number, after] = torch.tensor([good if label else bad for label in of_steps])
        yield ids, labels


def build(out: Path, steps: int, seed: int) -> None:
    """Write the model to `out/prm`."""
    begin(seed)
    tokenizer = tagged_tokenizer()
    model = make_model(MODEL, tokenizer)
    train(model, batches(tokenizer, f"{seed} lessons"), steps)
    save(model, tokenizer, out / "prm")


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 1000)()
