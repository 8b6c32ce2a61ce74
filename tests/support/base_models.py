"""The example's models as base models: the chat template closes turns by a token that is no eos, as in Qwen2.5's."""

import json
import shutil
from pathlib import Path
from typing import Any

CLOSER, EOS = 1, 0
"""Ids of `<|im_end|>`, with which the models were taught to end an answer, and of `<|endoftext|>`."""
_NAMES = {"<|end|>": "<|im_end|>", "<|pad|>": "<|endoftext|>"}
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def base_model(source: Path, folder: Path) -> Path:
    """Copy a model of the arithmetic example; what it computes stays the same."""
    shutil.copytree(source, folder)
    for name in _TEXTS:
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in _NAMES.items():
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(folder / "config.json", eos_token_id=EOS)
    edit(folder / "generation_config.json", eos_token_id=EOS)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document), encoding="utf-8")
