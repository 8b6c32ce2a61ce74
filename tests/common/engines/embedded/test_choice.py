"""The embedded engine that a worker gets: by `bitwise`, and by what the model keeps of a text."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Lfm2Config

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import AdapterEngine, room_of
from prefixrl.common.engines.make import make_engine
from support.models.engine_jobs import PROMPTS, TOKENS, finish, job
from support.models.tiny_model import VOCABULARY
from support.paths import EXAMPLE


def config_of(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", settings)


def offered(engine: AdapterEngine) -> tuple[int, int, bool]:
    return engine.seats, engine.room, engine.takes_runs


def test_rows_are_batched_continuously_unless_bitwise_is_asked_for() -> None:
    for role, model in (("rollout", "adapter"), ("scorer", "target")):
        engine = make_engine("auto", str(EXAMPLE / model), role, config_of())
        assert isinstance(engine, TransformersEngine)
        assert offered(engine) == (256, room_of(256), False)
        assert engine.about == "rows batched continuously, 256 at once; one_token attention"
        held = make_engine("auto", str(EXAMPLE / model), role, config_of("bitwise=true"))
        assert isinstance(held, FixedRowsEngine)
        assert offered(held) == (64, 64, True)
        assert held.about == "a task's rows are one forward: bitwise; sdpa attention"


def test_a_model_with_states_besides_keys_and_values_has_fixed_rows_and_says_why(
    tmp_path: Path,
) -> None:
    torch.manual_seed(2)
    shape = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    engine = make_engine("transformers", str(tmp_path), "scorer", config_of())
    assert isinstance(engine, FixedRowsEngine)
    assert engine.about.startswith(
        "a task's rows are one forward: lfm2: it keeps more of a text than keys and values;"
    )
    result = finish(engine, job("a"))["a"]
    assert [row.tokens.size for row in result.rows] == [TOKENS] * len(PROMPTS)
