"""Build the arithmetic example: problems, tokenizer, a frozen target and an adapter to train.

    python deploy/examples/arithmetic/build.py [--out DIR] [--steps N] [--seed S]

The task. A large model often knows several ways to solve a problem, and the first words of its answer (the opening)
decide which way it takes. Here this is so by construction. The target carries out four procedures without errors and
follows the one that its opening announces. Alone, it draws the opening from a fixed distribution (HABIT) that ignores
the question. So the target alone is right on a quarter of the problems, and so is every fixed prefix; only a prefix
that was chosen for the question is right on nearly all. The adapter is a smaller model with the same tokenizer. It
knows how answers begin, follows HABIT too, and depends only a little on the question (TAUGHT_HABIT, TAUGHT_RIGHT). It
was never trained on the steps of a procedure. Reinforcement learning has to find the rest from rewards of 0 and 1.

The length of a prefix. Openings have 6 or 7 tokens, and the adapter was taught to write an EOS after one. Within k =
8 it writes a whole opening and an EOS, which is an action in the loss and is removed before the target continues.
Without that EOS it would fill the rest of k with steps that it cannot compute, and spoil a good opening. If all
openings had exactly k tokens, no prefix would ever end early, as those of real adapters do. A prefix that ends too
early does no harm: the target completes the opening by HABIT.

The result is the same on every run with one thread on one type of CPU.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from prefixrl.deploy.examples.arithmetic.problems import (
    FAMILIES,
    HELDOUT_ROWS,
    OPENINGS,
    TRAIN_ROWS,
    Problem,
    stream,
    write_jsonl,
)
from prefixrl.deploy.examples.builder import begin, command_of, save

HABIT = (0.40, 0.25, 0.20, 0.15)
"""Shares of the openings when the target begins by itself. The first leads clearly: in a near-tie
rounding would choose the greedy answer."""

TAUGHT_HABIT, TAUGHT_RIGHT = 0.60, 0.22
"""The adapter's share of the habitual and of the right opening; the others share what is left. It must
look at the question from the start: an adapter that does not learns only which one opening pays best.
And habit must lead by far: were the two close, the first few updates would turn every greedy answer."""

K_TOKENS = 8
"""The longest prefix: the longest opening and an EOS."""

ANSWER_TOKENS = 20
"""The longest whole answer, its EOS included."""

POSITIONS = 128
"""The longest prompt with its answer."""

BATCH_ROWS = 128
PEAK_LR = 3e-3
IGNORED = -100
PAD, EOS, UNKNOWN, USER, ASSISTANT = (
    "<|pad|>",
    "<|end|>",
    "<|unknown|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '"
    + USER
    + "' + message['content'] }}"
    "{% else %}{{ '" + ASSISTANT + "' + message['content'] + '" + EOS + "' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


Lesson: TypeAlias = tuple[str, str]
"""A question, and the answer that a model is taught."""
LanguageModel: TypeAlias = Any
"""A causal model of transformers, whose `generate` type checkers cannot match to its own classes."""


@dataclass(frozen=True)
class Shape:
    """Size of a model. Heads have 32 channels, the smallest that every attention kernel of vLLM takes."""

    hidden: int
    layers: int
    heads: int


TARGET = Shape(hidden=128, layers=3, heads=4)
ADAPTER = Shape(hidden=64, layers=2, heads=2)


def make_tokenizer(more_texts: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token per word, digit and mark; decoding sets no space inside a box or before a colon."""
    texts = [*(family.name for family in FAMILIES), *OPENINGS, *more_texts]
    words = re.findall(r"[A-Za-z]+", " ".join(texts))
    special = [PAD, EOS, UNKNOWN, USER, ASSISTANT]
    plain = [*map(str, range(10)), ":", "so", "\\boxed{", "}", *dict.fromkeys(words)]
    vocabulary = {token: number for number, token in enumerate([*special, *plain])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"\\boxed\{|[A-Za-z]+|\S"), behavior="removed", invert=True
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace("\\boxed{ ", "\\boxed{"),
            decoders.Replace(" }", "}"),
            decoders.Replace(" :", ":"),
        ]
    )
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer, most_tokens: int = POSITIONS) -> PreTrainedTokenizerFast:
    """A tokenizer with its special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=most_tokens,
    )


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama with random weights, float32, tied embeddings.

    Not a Qwen2: AutoTokenizer gives every model of that type Qwen's own splitting and decoding,
    whatever tokenizer.json says. The generation config names the special tokens and nothing else:
    sampling is settled by whoever samples.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """The chat template's tokens up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def target_answer(problem: Problem, rng: random.Random) -> str:
    """A whole answer whose opening is drawn from habit: the question's family plays no part in it."""
    return problem.worked(rng.choices(range(len(OPENINGS)), HABIT)[0])


def adapter_answer(problem: Problem, rng: random.Random) -> str:
    """An opening alone, drawn with the taught shares."""
    right = FAMILIES.index(problem.family)
    habitual = HABIT.index(max(HABIT))
    others = [number for number in range(len(OPENINGS)) if number not in (right, habitual)]
    weights = [0.0] * len(OPENINGS)
    weights[habitual] += TAUGHT_HABIT
    weights[right] += TAUGHT_RIGHT
    for number in others:
        weights[number] = (1.0 - TAUGHT_HABIT - TAUGHT_RIGHT) / len(others)
    return OPENINGS[rng.choices(range(len(OPENINGS)), weights)[0]]


def batches(
    tokenizer: PreTrainedTokenizerFast, lessons: Iterator[Lesson]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), both (rows, tokens) int64, padded on the right; answers are labelled."""
    while True:
        rows = []
        for question, answer in islice(lessons, BATCH_ROWS):
            written = tokenizer.encode(answer, add_special_tokens=False)
            rows.append((prompt_ids(tokenizer, question), [*written, tokenizer.eos_token_id]))
        longest = max(len(prompt) + len(written) for prompt, written in rows)
        ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for number, (prompt, written) in enumerate(rows):
            ids[number, : len(prompt) + len(written)] = torch.tensor(prompt + written)
            labels[number, len(prompt) : len(prompt) + len(written)] = torch.tensor(written)
        yield ids, labels


def worked_lessons(
    problems: Iterator[Problem], answer: Callable[[Problem, random.Random], str], rng: random.Random
) -> Iterator[Lesson]:
    """Each problem's question, with an answer drawn for it."""
    return ((problem.question, answer(problem, rng)) for problem in problems)


def train(
    model: LanguageModel, data: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> float:
    """AdamW with a short warm-up and a cosine to zero; returns the last loss (nats per token)."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01
    )
    warm_up = max(1, steps // 20)
    model.train()
    value = math.nan
    for step, (ids, labels) in enumerate(islice(data, steps), start=1):
        lr = PEAK_LR * min(step / warm_up, 0.5 * (1.0 + math.cos(math.pi * step / (steps + 1))))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        if step % 100 == 0:
            click.echo(f"  step {step:4d}  loss {value:.3f}")
    model.eval()
    return value


@torch.inference_mode()
def generate(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Continue each row until EOS (not returned) or `max_new_tokens`; temperature 0 is greedy."""
    longest = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return [[token for token in row if token not in ends] for row in output[:, longest:].tolist()]


def right_by_family(
    target: LanguageModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    prefixes: Sequence[list[int]],
    temperature: float,
) -> list[float]:
    """For each family, the share of its problems that the target gets right after the prefixes."""
    rows = [
        prompt_ids(tokenizer, problem.question) + prefix
        for problem, prefix in zip(problems, prefixes, strict=True)
    ]
    texts = tokenizer.batch_decode(generate(target, tokenizer, rows, ANSWER_TOKENS, temperature))
    verdicts: dict[str, list[bool]] = {family.name: [] for family in FAMILIES}
    for problem, text in zip(problems, texts, strict=True):
        verdicts[problem.family.name].append(f"\\boxed{{{problem.gold}}}" in text)
    return [sum(own) / len(own) for own in verdicts.values()]


def report(
    adapter: LanguageModel,
    target: LanguageModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
) -> None:
    """Print what each way of choosing a prefix is worth, by family of problem."""
    openings = [tokenizer.encode(opening, add_special_tokens=False) for opening in OPENINGS]
    prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    arms: dict[str, list[list[int]]] = {"(no prefix)": [[]] * len(problems)}
    for opening, ids in zip(OPENINGS, openings, strict=True):
        arms[opening] = [ids] * len(problems)
    arms["(untrained adapter, greedy)"] = generate(adapter, tokenizer, prompts, K_TOKENS, 0.0)
    arms["(untrained adapter, sampled)"] = generate(adapter, tokenizer, prompts, K_TOKENS, 1.0)
    arms["(the right opening)"] = [openings[FAMILIES.index(problem.family)] for problem in problems]
    for temperature in (0.0, 0.7):
        click.echo(
            f"right answers of the target at temperature {temperature}, by prefix and family"
        )
        names = [*(family.name for family in FAMILIES), "all"]
        click.echo(" " * 32 + "".join(f"{name:>11}" for name in names))
        for name, prefixes in arms.items():
            shares = right_by_family(target, tokenizer, problems, prefixes, temperature)
            cells = [*shares, sum(shares) / len(shares)]
            click.echo(f"{name:<32}" + "".join(f"{cell:>11.3f}" for cell in cells))


def write_problems(out: Path, seed: int) -> tuple[list[Problem], set[tuple[int, ...]]]:
    """Write both problem files and the openings; returns the held-out problems and all digits used."""
    taken: set[tuple[int, ...]] = set()
    heldout = list(islice(stream(random.Random(f"{seed} heldout"), taken), HELDOUT_ROWS))
    training = list(islice(stream(random.Random(f"{seed} train"), taken), TRAIN_ROWS))
    write_jsonl(out / "heldout.jsonl", "heldout", heldout)
    write_jsonl(out / "train.jsonl", "train", training)
    openings = "".join(f"{opening}\n" for opening in OPENINGS)
    (out / "openings.txt").write_text(openings, encoding="utf-8")
    return heldout, taken


def build(out: Path, steps: int, seed: int) -> None:
    """Write problems, openings and both models to `out`, then print the report."""
    begin(seed)
    out.mkdir(parents=True, exist_ok=True)
    heldout, taken = write_problems(out, seed)
    tokenizer = make_tokenizer()
    for name, shape, answer, its_steps in (
        ("target", TARGET, target_answer, steps),
        # Twice as many: what the question has to say is faint among openings that are mostly wrong.
        ("adapter", ADAPTER, adapter_answer, 2 * steps),
    ):
        model = make_model(shape, tokenizer)
        size = sum(parameter.numel() for parameter in model.parameters())
        click.echo(f"{name}: {size / 1e6:.2f} M parameters, {its_steps} steps")
        lessons = stream(random.Random(f"{seed} {name}"), set(taken))
        rng = random.Random(f"{seed} answers of the {name}")
        train(model, batches(tokenizer, worked_lessons(lessons, answer, rng)), its_steps)
        save(model, tokenizer, out / name)

    adapter = AutoModelForCausalLM.from_pretrained(out / "adapter")
    target = AutoModelForCausalLM.from_pretrained(out / "target")
    report(adapter, target, tokenizer, heldout)


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, 500)()
