"""Engines started with settings or models of their own: hostile defaults, little cache, no seeds, two processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.snapshots import snapshot_of
from prefixrl.common.engines.vllm.engine import VllmEngine
from support.models import vllm_world as world
from support.models.engine_jobs import finish
from support.models.tiny_model import whole
from support.models.versioned import forward, fresh_model, perturbed
from support.models.vllm_world import EXAMPLE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
]

ADAPTER = EXAMPLE / "adapter"


@pytest.mark.chaos
def test_a_cache_too_small_for_all_rows_changes_nothing() -> None:
    """Rows are put back and begun again in the middle of their text."""
    job = world.job("a", rows=256, tokens=40, new=80)
    with world.started(ADAPTER, kv_cache_memory_bytes=8 * 2**20) as cramped:
        rows = finish(cramped, job)["a"].rows
    actual = world.differences(fresh_model(ADAPTER), job.rows, rows, 0.7)
    assert actual.size == 256 * 80
    assert actual.max() < 1e-3


@pytest.mark.chaos  # test_against_learner.py has such a config too
def test_a_hostile_generation_config_changes_nothing(tmp_path: Path) -> None:
    with world.started(ADAPTER) as engine:
        plain = finish(engine, world.job("a"))["a"].rows
    hostile = tmp_path / "hostile"
    shutil.copytree(ADAPTER, hostile)
    settings = {
        "do_sample": True,
        "temperature": 0.05,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.9,
        "repetition_penalty": 9.0,
        "eos_token_id": plain[0].tokens[:2].tolist(),
        "max_new_tokens": 2,
    }
    (hostile / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with world.started(hostile) as misled:
        rows = finish(misled, world.job("a"))["a"].rows
    for before, after in zip(plain, rows, strict=True):
        assert before.tokens.tolist() == after.tokens.tolist()
        assert before.finish == after.finish
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)


def test_a_scorer_may_draw_without_seeds_and_carries_no_logprobs() -> None:
    run = world.config()
    section = run.scorer.model_copy(
        update={"vllm": run.scorer.vllm.model_copy(update={"seeded": False})}
    )
    engine = world.make_engine(
        "vllm", str(EXAMPLE / "target"), "scorer", run.model_copy(update={"scorer": section})
    )
    assert isinstance(engine, VllmEngine)
    try:
        first = finish(engine, world.job("a", temperature=1.6))["a"]
        again = finish(engine, world.job("a", temperature=1.6))["a"]
        assert world.texts(first) != world.texts(again)
        assert all(row.tokens.size == 16 and row.logprobs.size == 0 for row in first.rows)
    finally:
        engine.close()


def test_float32_logits_bring_a_bfloat16_engine_nearer_to_the_learner(
    tmp_path: Path, report: Any
) -> None:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    made = Qwen2ForCausalLM(shape)
    for layer in (
        made.model.layers
    ):  # each layer adds nothing: processors round it differently, and the head is meant
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    made.model.norm.weight.data.fill_(
        8.0
    )  # logits up to about 10, where one step of bfloat16 is 0.06
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    learner = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    weight, mean_gaps = learner.lm_head.weight.float(), dict[str, float]()
    for head in ("float32", "model"):
        run = world.config(dtype="bfloat16")
        section = run.learner.model_copy(update={"dtype": "bfloat16", "head_dtype": head})
        with world.started(tmp_path, run=run.model_copy(update={"learner": section})) as engine:
            job = world.job("a", rows=32, new=24)
            rows = finish(engine, job)["a"].rows
        gaps = []
        for prompt, row in zip(job.rows, rows, strict=True):
            ids = torch.tensor([*prompt, *row.tokens])[None]
            with torch.no_grad():
                logits = learner.model(ids).last_hidden_state[0].float() @ weight.T
            expected = (
                (logits / 0.7)
                .log_softmax(-1)[len(prompt) - 1 : -1]
                .gather(1, ids[0, len(prompt) :, None])
            )
            gaps += (expected[:, 0] - torch.from_numpy(row.logprobs)).abs().tolist()
        mean_gaps[head] = sum(gaps) / len(gaps)
    report(
        f"mismatch at age 0 in bfloat16, nats: {mean_gaps['float32']:.2g}, bfloat16 logits {mean_gaps['model']:.2g}"
    )
    assert mean_gaps["float32"] < 0.1 * mean_gaps["model"]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied head", "head of its own"])
def test_fused_projections_with_biases_are_installed_whole(is_tied: bool, tmp_path: Path) -> None:
    shape = Qwen2Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(5)
    Qwen2ForCausalLM(shape).save_pretrained(tmp_path)
    check_installation(tmp_path)


@pytest.mark.chaos
def test_a_model_spread_over_two_processes_is_installed_whole() -> None:
    check_installation(ADAPTER, tensor_parallel_size=2)


def check_installation(folder: Path, **vllm: Any) -> None:
    """The probe before an installation and after it."""
    with world.started(folder, **vllm) as engine:
        initial = engine.weights()
        for tensors in (None, perturbed(initial, 1)):
            if tensors:
                engine.install(snapshot_of(1, tensors))
            expected = forward(fresh_model(folder, tensors), world.probe(), 1.0)
            assert engine.score([whole(world.probe())]) == pytest.approx(expected, abs=1e-3)
