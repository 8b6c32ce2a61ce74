"""Tiny process reward models, trained here, that judge answers of the arithmetic example."""

import functools
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.deploy.examples.arithmetic.build import make_tokenizer
from prefixrl.deploy.examples.openr_math import build as example
from prefixrl.scorer.process.formats import Marked, StepForm
from prefixrl.scorer.process.steps import split_steps
from prefixrl.scorer.process.torch_model import TorchStepModel

SEPARATOR = example.SEPARATOR
ROWS = 32
"""Rows of a training step."""
STEP_TAG = {"format": "step_tag", "separator": SEPARATOR}
TWO_CLASS = {"format": "two_class", "separator": SEPARATOR}
SMALL = {"max_tokens": 256, "aggregate": "min", "device": "cpu"}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)


def settings_of(folder: Path, **keys: Any) -> ProcessModelConfig:
    """The section for a tiny model."""
    return ProcessModelConfig.model_validate({"model": str(folder), **SMALL, **keys})


def word_tokenizer(added: Sequence[str] = ("ки", "+", "-")) -> PreTrainedTokenizerFast:
    """The example's tokenizer, with a tag and two candidates."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(added))
    tokenizer.model_max_length = 256
    return tokenizer


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
    drawn = itertools.islice(example.lessons(random.Random(seed)), pairs)
    return [(question, good, wrong, labels) for (question, good, _), (_, wrong, labels) in drawn]


def trained_step_tag(folder: Path, steps: int = 120) -> Path:
    """A causal Llama whose next token after the tag is + or -."""
    torch.manual_seed(1)
    tokenizer = word_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    form = StepForm(tokenizer, settings_of(folder, **STEP_TAG))
    columns = list(form.candidates())

    def logits(ids: torch.Tensor, lines: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids).logits[lines, places][:, columns]

    _train(list(model.parameters()), logits, form, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained_two_class(folder: Path, steps: int = 120) -> Path:
    """A Qwen2 with a head of two layers and two classes, saved as Qwen2.5-Math-PRM is."""
    torch.manual_seed(2)
    tokenizer = byte_tokenizer()
    size = 64
    body = Qwen2Model(
        Qwen2Config(
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
        )
    )
    head = torch.nn.Sequential(
        torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2)
    )
    tokenizer.save_pretrained(folder)
    form = StepForm(tokenizer, settings_of(folder, **TWO_CLASS))

    def logits(ids: torch.Tensor, lines: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = head(body(input_ids=ids).last_hidden_state[lines, places])[:, [1, 0]]
        return scored

    _train([*body.parameters(), *head.parameters()], logits, form, steps)
    save_two_class(folder, body, head)
    return folder


def save_two_class(folder: Path, body: Qwen2Model, head: torch.nn.Module) -> None:
    """Write body and head as one model of architecture Qwen2ForProcessRewardModel."""
    body.save_pretrained(folder)
    tensors = {
        f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {
        f"score.{name}": tensor.detach().clone() for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen2ForProcessRewardModel"]})
    )


def _train(parameters: list[torch.nn.Parameter], logits: Any, form: StepForm, steps: int) -> None:
    rows: list[tuple[Marked, list[int]]] = []
    for question, good, wrong, labels in lessons("lessons", ROWS * steps // 2):
        rows += [(marked(form, question, good), [1, 1]), (marked(form, question, wrong), labels)]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = rows[ROWS * step : ROWS * (step + 1)]
        width = max(row.tokens.size for row, _ in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.int64)
        for index, (row, _) in enumerate(batch):
            ids[index, : row.tokens.size] = torch.from_numpy(row.tokens.astype("int64"))
        lines = torch.tensor(
            [index for index, (row, _) in enumerate(batch) for _ in row.tag_positions]
        )
        places = torch.tensor([at for row, _ in batch for at in row.tag_positions])
        bad = torch.tensor([1 - label for _, labels in batch for label in labels])
        loss = torch.nn.functional.cross_entropy(logits(ids, lines, places), bad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def marked(form: StepForm, question: str, answer: str) -> Marked:
    """An answer of the example as the model reads it."""
    return form.marked_text(question, [step.text for step in split_steps(answer, SEPARATOR, 256)])


@functools.cache
def loaded(folder: Path, format_name: str) -> tuple[StepForm, TorchStepModel]:
    """A saved model, as a scorer loads it."""
    settings = settings_of(folder, **(STEP_TAG if format_name == "step_tag" else TWO_CLASS))
    form = StepForm(AutoTokenizer.from_pretrained(folder), settings)
    return form, TorchStepModel(str(folder), settings, form)
