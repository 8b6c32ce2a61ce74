"""Checkpoints: bitwise resume, damage noticed, nothing lost by keeping few."""

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prefixrl.common.config.run import CheckpointConfig, RunConfig
from prefixrl.common.errors import ConfigError, DataError, NotSaved
from prefixrl.learner.check.budget import rank_plan
from prefixrl.learner.check.disk_room import checkpoint_bytes
from prefixrl.learner.models.batch import pad
from prefixrl.learner.models.model import Models
from prefixrl.learner.run.retention import prune
from prefixrl.learner.training import checkpoint
from prefixrl.learner.training.checkpoint import TrainerState, damage, read_manifest, write_manifest
from prefixrl.learner.training.figures import IterationMetrics
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import (
    DEEPSPEED_WARNINGS,
    random_iteration,
    run_config,
    save_model,
    with_tokenizer,
)
from support.runs.small_disk import small_disk

pytestmark = DEEPSPEED_WARNINGS


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("adapter"), is_tied=True)
    with_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def config(adapter: Path) -> RunConfig:
    return run_config(adapter)


@pytest.fixture(scope="module")
def models(config: RunConfig) -> Models:
    return loaded(config)


def loaded(config: RunConfig) -> Models:
    return Models.load(config, 0, 1, config.adapter.model)


def train(models: Models, config: RunConfig, first: int, last: int) -> list[IterationMetrics]:
    return [train_iteration(models, random_iteration(i), config, 20) for i in range(first, last)]


def state(iteration: int, steps: int = 0) -> TrainerState:
    return TrainerState(iteration, steps, world_size=1)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (3, "float32"),
        (2, "bfloat16"),
        *(
            pytest.param(stage, dtype, marks=pytest.mark.nightly)
            for stage, dtype in (
                (0, "float32"),
                (1, "float32"),
                (2, "float32"),
                (1, "bfloat16"),
                (3, "bfloat16"),
            )
        ),
    ],
)
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(
    adapter: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    learner = {"deepspeed": {"zero_optimization": {"stage": stage}}, "dtype": dtype}
    config = run_config(adapter, learner=learner)
    whole = loaded(config)
    train(whole, config, 0, 2)
    checkpoint.save(tmp_path, whole, state(2, whole.optimizer_steps))
    expected = train(whole, config, 2, 4)

    resumed = loaded(config)
    assert checkpoint.load(tmp_path, resumed) == state(2, 4)
    assert resumed.optimizer_steps == 4
    assert train(resumed, config, 2, 4) == expected
    for trainee, twin in ((resumed.actor, whole.actor), (resumed.critic, whole.critic)):
        for (name, mine), (_, theirs) in zip(
            trainee.full_tensors(), twin.full_tensors(), strict=True
        ):
            assert torch.equal(mine, theirs), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_another_run_begins_with_adapter_and_critic_and_may_keep_the_reference(
    adapter: Path, tmp_path: Path, lora: dict[str, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, learner = loaded(run_config(adapter)), {"lora": lora}
    train(first, run_config(adapter), 0, 2)
    folder = checkpoint.save(tmp_path, first, state(2, first.optimizer_steps))
    rows = pad(list(random_iteration(0).samples.values()), 0)
    before, after = loaded(run_config(adapter)).forward_actor(rows)[0], first.forward_actor(rows)[0]
    for reference, expected in (("model", before), ("start", after)):
        section = {"model": str(adapter), "init_from": str(folder), "reference": reference}
        config = run_config(adapter, adapter=section, learner=learner)
        second = Models.load(config, 0, 1, config.adapter.start)
        checkpoint.take_critic(folder, second)
        assert second.optimizer_steps == 0 and not any(second.actor.adam.state.values())
        assert torch.allclose(second.forward_actor(rows)[0], after, atol=1e-6)
        assert torch.allclose(second.forward_reference(rows), expected, atol=1e-6)
        is_same = torch.allclose(second.forward_critic(rows), first.forward_critic(rows), atol=1e-6)
        assert is_same == (lora is None)
        train(second, config, 0, 1)
        assert torch.allclose(second.forward_reference(rows), expected, atol=1e-6)
    assert ("and a new critic: it fits this run only" in caplog.text) == (lora is not None)


def test_a_checkpoint_before_the_first_step_can_be_resumed(
    config: RunConfig, tmp_path: Path
) -> None:
    fresh = loaded(config)
    checkpoint.save(tmp_path, fresh, state(0))
    moved = loaded(config)
    train(moved, config, 0, 1)
    checkpoint.load(tmp_path, moved)
    assert train(moved, config, 0, 2) == train(fresh, config, 0, 2)


def test_the_random_generators_go_on_where_they_were(
    config: RunConfig, models: Models, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, models, state(1))
    expected = (torch.rand(3).tolist(), np.random.rand(), random.random())
    checkpoint.load(tmp_path, models)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected


def test_only_the_newest_are_kept_and_unfinished_ones_do_not_count(
    models: Models, tmp_path: Path
) -> None:
    for iteration in (3, 12, 7):
        (tmp_path / ".step_00000099.partial").mkdir(exist_ok=True)
        checkpoint.save(tmp_path, models, state(iteration))
        prune(tmp_path, CheckpointConfig(keep=2))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_00000007",
        "step_00000012",
    ]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000012"


def test_geometric_steps_stay_beside_the_newest(models: Models, tmp_path: Path) -> None:
    for iteration in range(1, 8):
        checkpoint.save(tmp_path, models, state(iteration))
        prune(tmp_path, CheckpointConfig(keep=1, growth=2))
    kept = sorted(int(path.name[5:]) for path in tmp_path.glob("step_*"))
    assert kept == [1, 2, 4, 7] and all(
        not checkpoint.damage(path) for path in tmp_path.glob("step_*")
    )


def test_a_checkpoint_that_finds_no_room_leaves_nothing_and_the_older_one_whole(
    models: Models, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        older = checkpoint.save(disk.path, models, state(1))
        disk.fill(64 << 10)
        with pytest.raises(
            NotSaved,
            match=rf"iteration 2 could not be written: .* free there; the newest one is {older}",
        ):
            checkpoint.save(disk.path, models, state(2))
        assert [path.name for path in disk.path.glob("*step*")] == [older.name]
        assert not damage(older)
        disk.make_room()
        assert checkpoint.save(disk.path, models, state(2)).name == "step_00000002"


def test_a_disk_that_fills_up_in_a_checkpoint_keeps_nothing_of_it(
    models: Models, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        disk.fill(64 << 10)  # without an older one nobody knows what it takes
        with pytest.raises(NotSaved, match=r"No space left on device.*there is no older one"):
            checkpoint.save(disk.path, models, state(1))
        assert not list(disk.path.glob("*step*"))


def test_the_room_that_a_checkpoint_takes_is_known_before(
    config: RunConfig, models: Models, tmp_path: Path
) -> None:
    train(models, config, 0, 1)
    folder = checkpoint.save(tmp_path, models, state(1))
    # Names and counts of steps are most of so small a model's files.
    tensors = [
        load_file(path)
        for path in folder.rglob("*.safetensors")
        if path.name != "random.safetensors"
    ]
    written = sum(each.nbytes for file in tensors for each in file.values())
    plan = rank_plan(config, 1)
    assert plan
    assert written == pytest.approx(checkpoint_bytes(plan), rel=0.02)


def test_nothing_to_resume_is_no_error(models: Models, tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "never written", models) is None


@pytest.mark.parametrize(
    "harm", ["flip a bit", "cut the end", "remove a file", "remove the manifest"]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    models: Models, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, models, state(1))
    newest = checkpoint.save(tmp_path, models, state(2))
    victim = newest / "rank_00000" / "actor.safetensors"
    data = bytearray(victim.read_bytes())
    if harm == "flip a bit":
        data[len(data) // 2] ^= 1
    victim.write_bytes(data[:-1] if harm == "cut the end" else data)
    if harm == "remove a file":
        victim.unlink()
    if harm == "remove the manifest":
        (newest / "manifest.json").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    assert "skipping the checkpoint" in caplog.text and str(newest) in caplog.text
    actual = checkpoint.load(tmp_path, models)
    assert actual is not None and actual.iteration == 1


def test_another_zero_stage_is_refused_with_the_way_out(
    adapter: Path, models: Models, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, models, state(1))
    other = loaded(run_config(adapter, learner={"deepspeed": {"zero_optimization": {"stage": 2}}}))
    with pytest.raises(DataError, match=r"ZeRO stage = 0, this run has 2; resume with 0, or .*/hf"):
        checkpoint.load(tmp_path, other)


def test_another_number_of_ranks_is_refused(models: Models, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, models, state(1))
    manifest = read_manifest(folder)
    four = msgspec.structs.replace(
        manifest, state=msgspec.structs.replace(manifest.state, world_size=4)
    )
    write_manifest(folder, four)
    with pytest.raises(DataError, match="learner ranks = 4, this run has 1"):
        checkpoint.load(tmp_path, models)


def test_the_export_is_the_adapter_with_its_own_tokenizer(
    adapter: Path, config: RunConfig, tmp_path: Path
) -> None:
    models = loaded(config)
    train(models, config, 0, 1)
    exported = checkpoint.save(tmp_path, models, state(1)) / "hf"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    for name, tensor in models.state_dict_for_publication().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (adapter / name).read_bytes()
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1, (
        "one can read what another can"
    )


def test_no_file_of_a_checkpoint_can_execute_anything(models: Models, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, models, state(1))
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".jinja"}


def test_a_checkpoint_of_another_release_is_refused_by_name_and_not_passed_over(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "step_00000002"
    folder.mkdir()
    older = {"format": 1, "state": {"iteration": 2, "journal_offset": 0, "config_digest": ""}}
    (folder / "manifest.json").write_text(json.dumps(older))
    with pytest.raises(
        ConfigError, match="has checkpoint format 1, this release reads 2; continue"
    ):
        checkpoint.latest(tmp_path)
