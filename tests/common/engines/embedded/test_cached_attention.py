"""One token per row: the attention over cached columns is that of the formula, head by head."""

from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from prefixrl.common.engines.embedded.cached_attention import NAME, one_token
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from support.models.tiny_model import VOCABULARY

SIZE, SCALING = 4, 0.3


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Return softmax(q K^T * scaling) V over the columns that a row sees."""
    rows, heads, _, size = query.shape
    result = torch.zeros(rows, 1, heads, size)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            own = seen[row, 0, 0]
            weights = (
                SCALING * key[row, shared, own].double() @ query[row, head, 0].double()
            ).softmax(dim=0)
            result[row, 0, head] = (
                (weights[:, None] * value[row, shared, own].double()).sum(dim=0).float()
            )
    return result


@hypothesis.settings(deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    shared=st.integers(1, 4),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
    is_added=st.booleans(),
)
def test_each_head_attends_as_the_formula_says(
    rows: int, groups: int, shared: int, columns: int, seed: int, is_added: bool
) -> None:
    made = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, groups * shared, 1, SIZE, generator=made)
    # As in a cache: the columns in use are a part of a wider block.
    key, value = (
        torch.randn(rows, groups, columns + 3, SIZE, generator=made)[:, :, 2:-1] for _ in range(2)
    )
    seen = torch.rand(rows, 1, 1, columns, generator=made) < 0.7
    seen[..., -1] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if is_added else seen
    expected = by_the_formula(query, key, value, seen)
    assert torch.allclose(one_token(query, key, value, mask, SCALING), expected, atol=1e-5)
    halves = (each.bfloat16() for each in (query, key, value))
    assert torch.allclose(one_token(*halves, seen, SCALING).float(), expected, atol=0.1)


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def engine_of(folder: Path, config: PreTrainedConfig) -> TransformersEngine:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return TransformersEngine(str(folder), "cpu", "float32", 1)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_models_with_plain_layers_decode_by_it(
    tmp_path: Path, kind: type[PreTrainedConfig]
) -> None:
    assert engine_of(tmp_path, kind(**SHAPE))._model.config._attn_implementation == NAME


def test_a_model_with_a_sliding_window_keeps_its_own_attention(tmp_path: Path) -> None:
    config = MistralConfig(**SHAPE, sliding_window=4)
    assert engine_of(tmp_path, config)._model.config._attn_implementation == "sdpa"
