"""Build the letters example: problems, tokenizers, a frozen target and an adapter to train.

    python deploy/examples/letters/build.py [--out DIR] [--steps N] [--seed S]       less than a minute on one core

    question   "flip cgad"                       one of eight first words, two for each of four operations; four letters
    prefix     "Read from the end:"              the adapter's, one of four openings if it is a good one
    answer     "Read from the end: dagc"         the target's: it does what the opening says, whatever the first word
    reward     0.25 per right letter             the share of the answer's letters that stand where the gold's do

The task. The adapter was taught the four openings with equal shares whatever the question: it begins by chance alone
and has to find out that the first word matters. A wrong opening may earn something, and one of the openings pays best
on average: an adapter that learns fast leans to that one first. One thing was chosen for it to succeed: how widely its
weights are spread before it is taught (`make_adapter`).

How it differs from the arithmetic example: adapter (GPT-2's architecture, byte-level BPE) and target (Llama's, a token
per character) share no tokenizer, so prefixes reach the target as text; rewards are fractions, and a user's function
gives them.

The result is the same on every run with one thread on one type of CPU.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from prefixrl.deploy.examples.arithmetic.build import IGNORED, LanguageModel, train
from prefixrl.deploy.examples.builder import begin, command_of, save
from prefixrl.deploy.examples.letters.problems import (
    ALPHABET,
    OPERATIONS,
    Problem,
    problems,
    write_jsonl,
)

TRAIN_ROWS, HELDOUT_ROWS = 256, 128
TARGET_STEPS, ADAPTER_SHARE = 500, 0.8
"""Steps that the target is taught, and the adapter's share of them."""
BATCH_ROWS = 64
PAD, EOS, UNKNOWN, USER, ASSISTANT = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")
SPECIAL = [PAD, EOS, UNKNOWN, USER, ASSISTANT]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '"
    + USER
    + "' + message['content'] }}"
    "{% else %}{{ '"
    + ASSISTANT
    + "' + message['content'] + '"
    + EOS
    + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)

Answer = Callable[[Problem, random.Random], str]


def build(out: Path, steps: int, seed: int) -> None:
    """Write problems and both models to `out`."""
    begin(seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for name, rows in (("heldout", HELDOUT_ROWS), ("train", TRAIN_ROWS)):
        write_jsonl(
            out / f"{name}.jsonl", name, problems(random.Random(f"{seed} {name}"), rows, taken)
        )
    characters, pieces = character_tokenizer(), piece_tokenizer()
    _teach(
        out / "target",
        make_target(characters),
        characters,
        _lessons(seed, "target", taken, whole),
        steps,
    )
    adapter_steps = max(1, round(ADAPTER_SHARE * steps))
    _teach(
        out / "adapter",
        make_adapter(pieces),
        pieces,
        _lessons(seed, "adapter", taken, opening),
        adapter_steps,
    )


def whole(problem: Problem, rng: random.Random) -> str:
    """An answer by any opening: what the question asks for plays no part in it."""
    return problem.answered(rng.choice(OPERATIONS))


def opening(problem: Problem, rng: random.Random) -> str:
    """Any opening, alone: the question plays no part in it."""
    return rng.choice(OPERATIONS).opening


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character."""
    text = "".join(
        [
            *(word for each in OPERATIONS for word in each.words),
            *(each.opening for each in OPERATIONS),
        ]
    )
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *sorted({*text, *ALPHABET, " "})])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each word of openings and questions is a token, and most letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [word for each in OPERATIONS for word in each.words]
    tokenizer.train_from_iterator([*(each.opening for each in OPERATIONS), *words], trainer)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=64,
    )


def make_target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.2 M with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def make_adapter(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """A GPT-2 of 0.06 M with random weights, without dropout.

    Weights are spread widely: with GPT-2's own 0.02 so narrow a model, taught to ignore the question, hardly sees it.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=2,
        n_inner=96,
        initializer_range=0.1,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return GPT2LMHeadModel(config)


def _lessons(
    seed: int, name: str, taken: set[str], answer: Answer
) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (question, answer) on letters that neither problem file holds."""
    rng, of_answers = (
        random.Random(f"{seed} {name}"),
        random.Random(f"{seed} answers of the {name}"),
    )
    while True:
        rows = [row for _ in range(BATCH_ROWS // 8) for row in problems(rng, 8, set(taken))]
        yield [(row.question, answer(row, of_answers)) for row in rows]


def _teach(
    folder: Path,
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Iterator[list[tuple[str, str]]],
    steps: int,
) -> None:
    """Train on the answers of lessons and save; sampling is settled by whoever samples."""
    click.echo(
        f"{folder.name}: {sum(each.numel() for each in model.parameters()) / 1e6:.2f} M parameters"
    )
    train(model, _batches(tokenizer, lessons), steps)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save(model, tokenizer, folder)


def _batches(
    tokenizer: PreTrainedTokenizerFast, lessons: Iterator[list[tuple[str, str]]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels), both (rows, tokens) int64, padded on the right; labels are the answers'."""
    begins, pad = tokenizer.convert_tokens_to_ids(ASSISTANT), tokenizer.pad_token_id
    for rows in lessons:
        texts = [f"{USER}{question}{ASSISTANT}{answer}{EOS}" for question, answer in rows]
        ids = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        is_begun = (ids == begins).cumsum(dim=1) > 0
        yield ids, torch.where(is_begun & (ids != begins) & (ids != pad), ids, IGNORED)


if __name__ == "__main__":
    command_of(build, Path(__file__).parent, TARGET_STEPS)()
