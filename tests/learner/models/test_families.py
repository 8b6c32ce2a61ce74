"""Families of models, at tiny sizes, as adapter and as target: right, or refused, as docs/models.md says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixrl.common.engines.interface.base import Continuation
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import DataError
from prefixrl.common.models.loading import check_model
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.learner.models.batch import Sample, pad
from prefixrl.learner.models.model import Models
from support.models.engine_jobs import PROMPTS, finish, job, settings
from support.models.tiny_model import DEEPSPEED_WARNINGS, VOCABULARY, run_config, with_tokenizer
from support.paths import ROOT

pytestmark = DEEPSPEED_WARNINGS
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
SHAPE |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SHAPE |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
ROWS = [*PROMPTS, [*range(30, 43)]]
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama, SmolLM2": {"model_type": "llama"},
    "Qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3": {"model_type": "qwen3"},
    "Mistral": {"model_type": "mistral"} | WINDOW,
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 2},
    "Gemma 2": {"model_type": "gemma2"} | WINDOW,
    "Gemma 3 (text)": {"model_type": "gemma3_text"} | WINDOW,
    "Phi": {"model_type": "phi"},
    "Phi-3": {"model_type": "phi3"},
    "SmolLM3": {"model_type": "smollm3"},
    "OLMo": {"model_type": "olmo"},
    "OLMo 2": {"model_type": "olmo2"},
    "GPT-NeoX": {"model_type": "gpt_neox"},
    "GPT-2": {"model_type": "gpt2"},
    "Granite": {"model_type": "granite", "logits_scaling": 4.0},
    "Cohere": {"model_type": "cohere"},
}
HEAD = ["| family | as an adapter | as a frozen target | prompt of a group |", "|---|---|---|---|"]


def made(folder: Path, model_type: str, **keys: Any) -> str:
    torch.manual_seed(5)
    shape = AutoConfig.for_model(model_type, **SHAPE | keys)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return str(with_tokenizer(folder))


def as_adapter(model: str) -> tuple[str, str]:
    """Compare a rollout's logprobs with the learner's, or say why not; how it computes the prompt of a group."""
    config = run_config(Path(model))
    try:
        check_model(model, "it", is_trained=True)
    except DataError as refused:
        with pytest.raises(DataError, match="does more to its logits than one linear layer"):
            Models.load(config, 0, 1, model)
        return "refused: " + str(refused).partition("(")[2].partition(" =")[0], ""
    asked = job("a", ROWS, settings(0.7), masks=renderer_of(config, "rollout").never_drawn("mask"))
    rows = zip(
        asked.rows,
        finish(make_engine("auto", model, "rollout", config), asked)["a"].rows,
        strict=True,
    )
    steps = [
        Sample(of, row.tokens, row.logprobs, 0.0, 0, np.ones(row.tokens.size, np.int32))
        for of, row in rows
    ]
    batch, models = pad(steps, 0), Models.load(config, 0, 1, model)
    with torch.no_grad():
        gap = (models.forward_actor(batch)[0] - batch.behaviour).abs()[batch.mask].max()
    return (
        "right" if gap < 1e-5 else f"off by {gap:.0e} nat",
        "once" if models.is_shared else "with every row",
    )


def as_target(model: str) -> str:
    """Compare the engine's greedy texts and their logprobs with transformers' own forward pass."""
    asked = job("a", ROWS, settings(0.0))
    engine = make_engine("auto", model, "scorer", run_config(Path(model)))
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def is_right(prompt: Any, row: Continuation) -> bool:
        logprobs = (
            own(torch.as_tensor(np.concatenate([prompt, row.tokens]))[None].long())
            .logits[0]
            .log_softmax(-1)
        )
        best = logprobs[len(prompt) - 1 : -1].max(-1)
        return row.tokens.tolist() == best.indices.tolist() and np.allclose(
            row.logprobs, best.values, atol=1e-4
        )

    return "right" if all(map(is_right, asked.rows, finish(engine, asked)["a"].rows)) else "wrong"


@pytest.mark.slow
def test_every_family_is_what_the_docs_say(tmp_path: Path) -> None:
    lines = list(HEAD)
    for name, keys in FAMILIES.items():
        model = made(tmp_path / name, **keys)
        adapter, prompt = as_adapter(model)
        lines.append(f"| {name} | {adapter} | {as_target(model)} | {prompt} |")
    table = "\n".join(lines)
    assert table in (ROOT / "docs/models.md").read_text(encoding="utf-8"), (
        f"docs/models.md should have\n{table}"
    )
