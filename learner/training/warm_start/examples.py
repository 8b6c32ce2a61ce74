"""Examples of a warm start: a prompt of the adapter, and a prefix as its rollout would write it. Pure.

answer ──tokens──▶ up to the first end that is an action, or `most_tokens` ──▶ prefix
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixrl.common.wire.packing import TokenIds


@dataclass(frozen=True)
class Example:
    """A prompt, and the tokens that the adapter is to write after it."""

    problem: str
    """Id of the problem."""
    prompt: TokenIds
    prefix: TokenIds


@dataclass(frozen=True)
class PrefixForm:
    """The form of everything that a rollout writes."""

    most_tokens: int
    """Length of a prefix without an end."""
    ends: frozenset[int]
    """Tokens that end a prefix, and are its last action."""
    end: int
    """The end of a text that is shorter."""
    never: frozenset[int] = frozenset()
    """Tokens that a rollout never draws."""

    def prefix_of(self, tokens: TokenIds) -> TokenIds | None:
        """Return the prefix with which a text begins; None where no rollout could have written it."""
        prefix = tokens[: self.most_tokens]
        ends = np.flatnonzero(np.isin(prefix, list(self.ends)))
        if ends.size:
            prefix = prefix[: ends[0] + 1]
        elif prefix.size < self.most_tokens:
            prefix = np.append(prefix, np.int32(self.end))
        return None if self.never.intersection(prefix.tolist()) else prefix


def examples_of(
    prompts: dict[str, TokenIds],
    texts: Sequence[tuple[str, str]],
    encode: Callable[[str], TokenIds],
    form: PrefixForm,
) -> list[Example]:
    """Return an example for every text that has one, in their order; equal ones count as often as they come.

    Args:
        prompts: prompts by problem; a problem without one has no examples.
        texts: (problem, text).
        encode: tokens of a text, by the adapter's tokenizer.
        form: what a rollout writes.
    """
    examples = []
    for problem, text in texts:
        prefix = form.prefix_of(encode(text))
        if prefix is not None and problem in prompts:
            examples.append(Example(problem, prompts[problem], prefix))
    return examples


def split_examples(
    examples: Sequence[Example], held_out_fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on, and those of held-out problems: at least one, if there are two."""
    problems = sorted({example.problem for example in examples})
    random.Random(seed).shuffle(problems)
    count = min(max(1, round(held_out_fraction * len(problems))), len(problems) - 1)
    held_out = set(problems[:count])
    return (
        [example for example in examples if example.problem not in held_out],
        [example for example in examples if example.problem in held_out],
    )


def batches_of(examples: Sequence[Example], batch_rows: int, seed: int) -> list[list[Example]]:
    """Return the batches of an epoch, every example once, in an order that follows from the seed."""
    order = list(examples)
    random.Random(seed).shuffle(order)
    return [order[start : start + batch_rows] for start in range(0, len(order), batch_rows)]


def micro_batches(batch: Sequence[Example], most_tokens: int) -> list[list[Example]]:
    """Return a batch in parts of at most so many padded tokens, or of one example; equal lengths stand together."""
    parts: list[list[Example]] = []
    width = 0
    for example in sorted(batch, key=_size, reverse=True):
        if parts and width * (len(parts[-1]) + 1) <= most_tokens:
            parts[-1].append(example)
            continue
        width = _size(example)
        parts.append([example])
    return parts


def _size(example: Example) -> int:
    return int(example.prompt.size + example.prefix.size)
