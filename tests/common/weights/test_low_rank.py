"""Matrices in place of whole weights: the same policy as merged weights, and a small part of the bytes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.snapshots import snapshot_of
from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.make import make_engine
from prefixrl.common.errors import ConfigError
from prefixrl.common.weights.low_rank import AdapterFolders, are_low_rank, pairs, published_name
from prefixrl.learner.models import lora
from prefixrl.learner.models.model import Models
from support.models.tiny_model import DEEPSPEED_WARNINGS
from support.paths import EXAMPLE

pytestmark = DEEPSPEED_WARNINGS
ADAPTER = EXAMPLE / "adapter"
ROWS = [(np.arange(2, 12, dtype=np.int32), np.arange(12, 38, dtype=np.int32))]


def run(*settings: str) -> RunConfig:
    return load(EXAMPLE / "run.toml", ("learner.lora={rank=4}", *settings))


@pytest.fixture(scope="module")
def trained() -> Models:
    """A learner whose low-rank matrices have moved."""
    models = Models.load(run(), 0, 1, str(ADAPTER))
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in models.actor.engine.module.named_parameters():
            if "lora_B" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return models


def matrices(models: Models) -> dict[str, torch.Tensor]:
    named = models.actor.full_tensors(lambda name: published_name(name) is not None)
    return {
        str(published_name(name.removeprefix("model."))): tensor.clone() for name, tensor in named
    }


def test_the_policy_of_the_matrices_is_that_of_merged_weights_and_of_the_learner(
    trained: Models,
) -> None:
    merged = snapshot_of(1, trained.state_dict_for_publication())
    sent = snapshot_of(1, matrices(trained))
    whole = TransformersEngine(str(ADAPTER), "cpu", "float32", 1)
    whole.install(merged)
    engine = make_engine("transformers", str(ADAPTER), "rollout", run())
    before = engine.score(ROWS)
    engine.install(sent)
    actual, expected = engine.score(ROWS), whole.score(ROWS)
    assert np.abs(actual - expected).max() < 1e-5 < np.abs(actual - before).max()
    assert np.abs(actual - trained.probe_logprobs(ROWS)).max() < 1e-5
    assert engine.checksum().follows == "snapshot"
    assert sent.manifest.size_bytes < merged.manifest.size_bytes / 4


def test_matrices_that_do_not_fit_are_refused_and_change_nothing(trained: Models) -> None:
    engine = make_engine("transformers", str(ADAPTER), "rollout", run())
    sent = matrices(trained)
    engine.install(snapshot_of(1, sent))
    before, name = engine.score(ROWS), next(iter(sent))
    for wrong, message in (
        ({each: tensor for each, tensor in sent.items() if each != name}, "one is missing"),
        (sent | {name: torch.zeros(4, 3)}, "have shapes"),
        (sent | {name: sent[name].bfloat16()}, "its weight is torch.float32"),
        (sent | {"model.other.weight": torch.zeros(3)}, "model.other.weight is no low-rank matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.install(snapshot_of(2, wrong))
    assert np.array_equal(engine.score(ROWS), before)


def test_a_version_tells_by_its_names_what_it_holds(trained: Models) -> None:
    assert are_low_rank(matrices(trained)) and not are_low_rank(
        trained.state_dict_for_publication()
    )
    own = TransformersEngine(str(ADAPTER), "cpu", "float32", 1).weights()
    assert {
        name.removeprefix("model.layers.0.")
        for name in pairs(matrices(trained), own)
        if ".0." in name
    } == {f"self_attn.{each}_proj" for each in "qkvo"} | {
        f"mlp.{each}_proj" for each in ("gate", "up", "down")
    }
    assert published_name("model.layers.0.mlp.up_proj.base_layer.weight") is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param(
            "learner.lora={target_modules=['lm_head']}",
            r"target_modules = \['lm_head'\].*publish = .merged.",
            id="matrices of the output layer",
        ),
        pytest.param(
            "learner.lora={rank=600}",
            "rank = 600: vLLM takes matrices of rank 512",
            id="a rank that is too high",
        ),
    ],
)
def test_what_vllm_cannot_take_is_refused_at_start_and_goes_merged_by_choice(
    setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("rollout.engine=vllm", setting)
    run("rollout.engine=transformers", setting)
    run("rollout.engine=vllm", setting, "learner.lora.publish=merged")


def test_answers_that_cross_an_update_need_merged_weights() -> None:
    with pytest.raises(ConfigError, match=r"in_flight.*publish = \"merged\""):
        run("rollout.swap=in_flight")
    run("rollout.swap=in_flight", "learner.lora.publish=merged")


def test_merged_weights_are_the_slow_sum(trained: Models, tmp_path: Path) -> None:
    """As before for those who choose it: W + alpha / rank * B A, entry by entry."""
    own = TransformersEngine(str(ADAPTER), "cpu", "float32", 1).weights()
    sent, settings = pairs(matrices(trained), own), LoraConfig(rank=4)
    merged = trained.state_dict_for_publication()
    for layer, (first, second) in sent.items():
        for row, column in ((0, 0), (3, 5)):
            added = sum(float(second[row, each]) * float(first[each, column]) for each in range(4))
            value = (
                float(own[f"{layer}.weight"][row, column]) + settings.alpha / settings.rank * added
            )
            assert float(merged[f"{layer}.weight"][row, column]) == pytest.approx(value, abs=1e-6)
    assert lora.FROZEN


LEFT = """
import sys, torch
from pathlib import Path
from prefixrl.common.weights.low_rank import AdapterFolders, LowRank
folders = AdapterFolders(Path(sys.argv[1]))
folders.write({"layer": (torch.zeros(2, 2), torch.zeros(2, 2))}, LowRank(2, 1.0, ("layer",)))
print("written", flush=True)
sys.stdin.read()
"""


def test_matrices_that_a_killed_process_left_in_memory_are_removed_by_the_next_and_others_stay(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LEFT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        (theirs,) = tmp_path.glob("prefixrl-adapter-*")
        held = AdapterFolders(tmp_path)
        assert theirs.is_dir(), "its process lives"
        child.kill()
    assert list((theirs / "1").iterdir()) != []
    (begun := tmp_path / "prefixrl-adapter-begun").mkdir()
    another = AdapterFolders(tmp_path)
    begun.rmdir()  # it was not taken for a left one
    assert (
        not theirs.exists()
        and len(list(tmp_path.glob("prefixrl-adapter-*"))) == len({held, another}) == 2
    )
    for each in (held, another):
        each._root.cleanup()
