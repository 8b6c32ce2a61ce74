"""Tiny process reward models that judge answers of the arithmetic example: the shipped one, and one trained here."""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.deploy.examples.arithmetic.build import IGNORED, train
from prefixrl.deploy.examples.openr_math import build as example
from prefixrl.scorer.process.formats import Marked, StepForm
from prefixrl.scorer.process.steps import split_steps
from prefixrl.scorer.process.torch_model import TorchStepModel
from support.models.base_models import edit
from support.paths import EXAMPLES

SEPARATOR = example.SEPARATOR
ROWS, STEPS = 32, 120
"""Rows of a training step; steps."""
STEP_TAG_MODEL = EXAMPLES / "openr_math" / "prm"
STEP_TAG: dict[str, Any] = {"format": "step_tag", "separator": SEPARATOR, "max_tokens": 128}
TWO_CLASS: dict[str, Any] = {"format": "two_class", "separator": SEPARATOR, "max_tokens": 256}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)


def settings_of(folder: Path, **keys: Any) -> ProcessModelConfig:
    """The section for a tiny model."""
    return ProcessModelConfig.model_validate(
        {"model": str(folder), "aggregate": "min", "device": "cpu", **keys}
    )


def byte_tokenizer(special: Sequence[str] = ("<extra_0>",)) -> PreTrainedTokenizerFast:
    """A token per byte, and the special tokens of Qwen2.5-Math-PRM's form."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *special],
        chat_template=CHAT,
        model_max_length=256,
    )


def lessons(seed: str, pairs: int) -> list[tuple[str, str, str, list[int]]]:
    """Questions with a good answer, a corrupted one, and the labels of the latter's two steps."""
    pairs_of_answers = itertools.islice(example.lessons(random.Random(seed)), pairs)
    return [
        (question, good, wrong, labels)
        for (question, good, _), (_, wrong, labels) in pairs_of_answers
    ]


def trained_two_class(folder: Path) -> Path:
    """A Qwen2 with a head of two layers and two classes, saved as Qwen2.5-Math-PRM is."""
    torch.manual_seed(2)
    tokenizer = byte_tokenizer()
    size = 64
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=2,
        classifier_dropout=0.0,
    )
    model = Qwen2ForTokenClassification(shape)
    model.score = torch.nn.Sequential(
        torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2)
    )
    train(model, _batches(StepForm(tokenizer, settings_of(folder, **TWO_CLASS))), STEPS)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit(folder / "config.json", architectures=["Qwen2ForProcessRewardModel"])
    return folder


def _batches(form: StepForm) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of right and corrupted answers; the tag of each step is labelled."""
    rows: list[tuple[Marked, list[int]]] = []
    for question, good, wrong, labels in lessons("lessons", ROWS * STEPS // 2):
        rows += [(marked(form, question, good), [1, 1]), (marked(form, question, wrong), labels)]
    for start in range(0, len(rows), ROWS):
        batch = rows[start : start + ROWS]
        ids = pad_sequence([torch.from_numpy(row.tokens) for row, _ in batch], batch_first=True)
        targets = torch.full_like(ids, IGNORED, dtype=torch.int64)
        for index, (row, labels) in enumerate(batch):
            targets[index, list(row.tag_positions)] = torch.tensor(labels)
        yield ids, targets


def marked(form: StepForm, question: str, answer: str) -> Marked:
    """An answer of the example as the model reads it."""
    return form.marked_text(question, [step.text for step in split_steps(answer, SEPARATOR, 256)])


@functools.cache
def loaded(folder: Path, format_name: str) -> tuple[StepForm, TorchStepModel]:
    """A saved model, as a scorer loads it."""
    settings = settings_of(folder, **(STEP_TAG if format_name == "step_tag" else TWO_CLASS))
    form = StepForm(AutoTokenizer.from_pretrained(folder), settings)
    return form, TorchStepModel(str(folder), settings, form)
