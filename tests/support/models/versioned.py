"""A tiny real model whose output says which of its versions wrote it, and what each version thinks of any text."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from prefixrl.common.engines.interface.base import TokenIds
from support.models.tiny_model import save_model

FIRST = 256
"""Below are the bytes of prompts."""
CHOICES = 4
"""Tokens of each version, among which it chooses by what stands before."""
VERSIONS = 16
VOCABULARY = FIRST + CHOICES * VERSIONS
PUSH = 30.0
"""A channel of every state that outweighs the others, and that the head turns into the choice of the version."""
Tensors = dict[str, torch.Tensor]


def save(folder: Path) -> Path:
    """The initial model, version 0."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
    save_model(folder, vocab_size=VOCABULARY, **sizes)
    model = fresh_model(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = PUSH  # so the first channel of every state is large
    model.load_state_dict(version(dict(model.named_parameters()), 0))
    model.save_pretrained(folder)
    return folder


def version(tensors: Tensors, number: int) -> Tensors:
    """Weights that write tokens `FIRST + CHOICES * number` to the next version's, and no others.

    The rest differs too.
    """
    moved = perturbed(tensors, number)
    moved["model.embed_tokens.weight"][:, 0] = PUSH
    head = moved["lm_head.weight"]
    head[:, 0] = -10.0
    head[FIRST + CHOICES * number : FIRST + CHOICES * (number + 1), 0] = 10.0
    return moved


def perturbed(tensors: Tensors, seed: int) -> Tensors:
    """Every weight moved by noise, of a tenth of its tensor's spread."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: tensor.detach()
        + 0.1 * tensor.std().clamp(min=0.05) * torch.randn(tensor.shape, generator=random)
        for name, tensor in tensors.items()
    }


def written_by(tokens: TokenIds) -> NDArray[np.int32]:
    """The version that wrote each token, from the token itself."""
    return ((tokens - FIRST) // CHOICES).astype(np.int32)


def fresh_model(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """A model that no engine has touched, with other weights if given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if tensors:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def logprobs(
    folder: Path, tensors: Tensors, text: TokenIds, temperature: float
) -> NDArray[np.float64]:
    """Logprob of every token but the first by a fresh model."""
    return forward(fresh_model(folder, tensors), text, temperature)


@torch.no_grad()
def forward(model: Any, ids: TokenIds, temperature: float) -> NDArray[np.float64]:
    """Logprob of every token but the first by one forward over all of them, in double precision from the logits on."""
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    picked: NDArray[np.float64] = table[torch.arange(len(ids) - 1), ids[1:]].numpy()
    return picked
