"""Attention over packed rows equals that over each row alone, whatever the layer's options."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)

from prefixrl.common.errors import ConfigError
from prefixrl.learner.models import attention
from prefixrl.learner.models.backbone import hidden_at_actions
from prefixrl.learner.models.model import Models
from prefixrl.learner.models.varlen import row_offsets
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config

pytestmark = DEEPSPEED_WARNINGS

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LENGTHS = (1, 7, 13, 3)


def model(kind: type[Any], key_heads: int, **options: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    shape = kind(**SHAPE, num_key_value_heads=key_heads, sliding_window=4, **options)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(shape, attn_implementation="varlen")
    return made.double()


def batch() -> dict[str, Tensor]:
    width = max(LENGTHS)
    ids = torch.randint(2, 50, (len(LENGTHS), width), generator=torch.Generator().manual_seed(2))
    places = torch.arange(width)
    mask = (places < torch.tensor(LENGTHS)[:, None]).long()
    actions = torch.cat([row * width + torch.arange(length) for row, length in enumerate(LENGTHS)])
    positions = (places * mask).expand_as(ids)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "actions": actions}


def gradients(of: PreTrainedModel, hidden: Tensor) -> list[Tensor]:
    weights = [each for name, each in of.get_decoder().named_parameters() if "embed" not in name]
    return list(torch.autograd.grad(hidden.square().sum(), weights))


@pytest.mark.parametrize("kind", ["plain", "grouped", "window"])
def test_packed_rows_and_their_gradients_are_those_of_each_row_alone(kind: str) -> None:
    one = model(
        *{"plain": (LlamaConfig, 4), "grouped": (LlamaConfig, 2), "window": (MistralConfig, 2)}[
            kind
        ]
    )
    rows = batch()
    packed = hidden_at_actions(one.get_decoder(), rows, is_packed=True)
    plain = AutoModelForCausalLM.from_config(one.config, attn_implementation="eager").double()
    plain.load_state_dict(one.state_dict())
    alone = torch.cat(
        [
            plain.get_decoder()(input_ids=ids[:length][None], use_cache=False).last_hidden_state[0]
            for ids, length in zip(rows["input_ids"], LENGTHS, strict=True)
        ]
    )
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=2e-6)
    for mine, theirs in zip(gradients(one, packed), gradients(plain, alone), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


def test_rows_without_a_token_have_no_place() -> None:
    offsets = row_offsets(torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool())
    assert offsets["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert offsets["cu_seq_lens_q"].dtype == torch.int32
    assert offsets["max_length_q"] == 3


def test_a_layer_that_needs_more_is_refused_by_name() -> None:
    capped = model(Gemma2Config, 2, head_dim=8, query_pre_attn_scalar=8)
    with pytest.raises(
        ValueError, match="does not serve Gemma2Attention, which needs softcap; use sdpa"
    ):
        hidden_at_actions(capped.get_decoder(), batch(), is_packed=True)


def test_a_model_that_it_does_not_serve_is_refused_by_name_or_packed_by_sdpa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    shape = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": None}
    model(Gemma2Config, 2, **shape).float().save_pretrained(folder)
    asked = run_config(folder, learner={"attn_implementation": "varlen"})
    with pytest.raises(ConfigError, match=r"does not serve adapter.model = .*use sdpa or auto"):
        Models.load(asked, 0, 1, str(folder))
    chosen = run_config(folder, learner={"packed": True})
    monkeypatch.setattr(attention, "_has_kernel", lambda config, device_type: True)
    loaded = Models.load(chosen, 0, 1, str(folder))
    actor = loaded.actor.engine.module.model
    assert loaded.is_packed and actor.config._attn_implementation == "sdpa"
    rows = batch()
    packed = hidden_at_actions(actor.get_decoder(), rows, is_packed=True)
    alone = [
        actor.get_decoder()(input_ids=ids[:length][None], use_cache=False).last_hidden_state[0]
        for ids, length in zip(rows["input_ids"], LENGTHS, strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
