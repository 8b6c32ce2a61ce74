"""Teach the models of a task: the target whole answers by any opening, the adapter openings whatever the question.

Each architecture's `initializer_range` is its library's own 0.02."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

from benchmarks.newcomer.tasks import Problem, Task, problems, write_problems
from prefixrl.deploy.examples.arithmetic.build import IGNORED, LanguageModel, train
from prefixrl.deploy.examples.builder import begin, save
from prefixrl.deploy.examples.letters.build import ASSISTANT, CHAT_TEMPLATE, EOS, PAD, SPECIAL, USER

TARGET_TOKENS, ADAPTER_TOKENS = 700, 400
"""Most tokens of each vocabulary."""
ADAPTER_STEPS, BATCH_ROWS = 400, 64
Batch = tuple[torch.Tensor, torch.Tensor]


def build(task: Task, out: Path, seed: int = 0) -> None:
    """Write problems and both models of a task to `out`."""
    begin(seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    write_problems(task, out, seed)
    for name, steps, size in (
        ("target", task.target_steps, TARGET_TOKENS),
        ("adapter", ADAPTER_STEPS, ADAPTER_TOKENS),
    ):
        tokenizer = pieces(task, size, with_numbers=name == "target")
        model = _target(task, tokenizer) if name == "target" else _adapter(task, tokenizer)
        print(
            f"{out.name}, {name}: {sum(weights.numel() for weights in model.parameters()) / 1e6:.2f} M parameters",
            flush=True,
        )
        train(
            model,
            _lessons(task, tokenizer, random.Random(f"{seed} {name}"), is_whole=name == "target"),
            steps,
        )
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        save(model, tokenizer, out / name)


def pieces(task: Task, size: int, *, with_numbers: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a task's texts, with or without the answers' numbers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    rows, kinds = problems(task), task.kinds
    answers = (
        row.answered(kind) if with_numbers else kind.opening for row in rows for kind in kinds
    )
    tokenizer.train_from_iterator([*(row.question for row in rows), *answers], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def _target(task: Task, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A Llama of 0.9 M for `units`, of 0.4 M for the others."""
    width, layers, inner = task.target_shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**_common(tokenizer), **sizes))


def _adapter(task: Task, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """A model of about 0.13 M: Qwen2, Llama or GPT-2 by the task."""
    common = _common(tokenizer)
    if task.adapter == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(**common, n_positions=128, n_embd=64, n_layer=2, n_head=2)
        )
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if task.adapter == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, **sizes))
    return Qwen2ForCausalLM(Qwen2Config(**common, **sizes, num_key_value_heads=2))


def _common(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _lessons(
    task: Task, tokenizer: PreTrainedTokenizerFast, rng: random.Random, *, is_whole: bool
) -> Iterator[Batch]:
    """Endless batches of (ids, labels), both (rows, tokens) int64, padded on the right; labels are the answers'."""
    rows = problems(task)
    while True:
        texts = [
            f"{USER}{row.question}{ASSISTANT}{_answer(row, task, rng, is_whole)}{EOS}"
            for row in rng.choices(rows, k=BATCH_ROWS)
        ]
        ids = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        begins = ids == tokenizer.convert_tokens_to_ids(ASSISTANT)
        is_answer = (begins.cumsum(dim=1) > 0) & ~begins & (ids != tokenizer.pad_token_id)
        yield ids, torch.where(is_answer, ids, IGNORED)


def _answer(problem: Problem, task: Task, rng: random.Random, is_whole: bool) -> str:
    """Return what a model is taught to answer: the target any opening and its result, the adapter an opening."""
    has_habit = not is_whole and task.habit > 0.0 and rng.random() < task.habit
    kind = task.kinds[0] if has_habit else rng.choice(task.kinds)
    return problem.answered(kind) if is_whole else kind.opening
