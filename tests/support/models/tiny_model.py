"""A tiny real model on disk and recorded-looking batches for it, for the learner's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.packing import ProbeRow
from prefixrl.learner.models.batch import IterationData, Sample

VOCABULARY = 61

DEEPSPEED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
"""Warnings that DeepSpeed causes in torch; every other one stays an error."""


def save_model(folder: Path, *, is_tied: bool = False, **keys: Any) -> Path:
    """A two-layer Qwen2 with random weights, large enough spread that policies differ."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    shape = Qwen2Config(
        **sizes | keys,
        tie_word_embeddings=is_tied,
        attention_dropout=0.0,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path, words: int = VOCABULARY, added: Sequence[str] = ()) -> Path:
    """Give a model folder a tokenizer of words, w0 and so on; w1 ends a text."""
    vocabulary = {f"w{index}": index for index in range(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w1")
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return folder


def whole(tokens: Sequence[int]) -> ProbeRow:
    """A text as a row of a probe, scored but for its first token."""
    ids = np.asarray(tokens, dtype=np.int32)
    return ids[:1], ids[1:]


def run_config(model: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of 4 groups of 3 in 2 optimiser steps on the CPU, with sections changed as given."""
    algorithm = {
        "groups_per_iteration": 4,
        "samples_per_prompt": 3,
        "iterations": 10,
        "minibatches": 2,
        "kl": 0.05,
        "entropy": 0.01,
    }
    learner = {
        "dtype": "float32",
        "device": "cpu",
        "actor_lr": 1e-3,
        "critic_lr": 2e-3,
        "micro_batch_tokens": 60,
    }
    return RunConfig.model_validate(
        {
            "directory": str(model.parent / "run"),
            "adapter": {"model": str(model)},
            "target": {"model": str(model)},
            "data": {"train": "unused.jsonl"},
            "rollout": {"temperature": 0.7},
            **sections,
            "algorithm": algorithm | sections.get("algorithm", {}),
            "learner": learner | sections.get("learner", {}),
        }
    )


def random_iteration(iteration: int, *, groups: int = 4, samples: int = 3) -> IterationData:
    """Ragged rows with random tokens, steps, 0/1 rewards and behaviour logprobs of no particular policy."""
    of_steps = np.random.Generator(np.random.PCG64(5000 + iteration))
    random = np.random.Generator(np.random.PCG64(1000 + iteration))
    rows: dict[int, Sample] = {}
    for group in range(groups):
        prompt = random.integers(2, VOCABULARY, random.integers(1, 9)).astype(np.int32)
        for _ in range(samples):
            tokens = random.integers(2, VOCABULARY, random.integers(1, 8)).astype(np.int32)
            logprobs = random.normal(-4.0, 0.6, len(tokens)).clip(max=-0.1).astype(np.float32)
            reward = float(random.integers(0, 2))
            versions = np.full(len(tokens), iteration, dtype=np.int32)
            ends = np.flatnonzero(of_steps.random(len(tokens)) < 0.4) + 1
            steps = tuple((int(end), round(float(of_steps.random()), 3)) for end in ends)
            rows[len(rows)] = Sample(prompt, tokens, logprobs, reward, group, versions, steps)
    return IterationData(
        iteration=iteration,
        seed=77 + iteration,
        lengths=tuple((len(row.prompt_tokens), len(row.tokens)) for row in rows.values()),
        rewards=tuple(row.reward for row in rows.values()),
        groups=tuple(row.group for row in rows.values()),
        samples=rows,
    )
