"""The room of a run is known before it starts: the line of --check, and the refusal."""

from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.learner.check.budget import rank_plan
from prefixrl.learner.check.disk_room import check_room, checkpoint_bytes, most_bytes, room_lines
from prefixrl.learner.check.footprint import RankPlan
from support.models.tiny_model import run_config, save_model
from support.runs.small_disk import small_disk

MIB = 2**20


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_model(tmp_path / "adapter", is_tied=True)


def config_in(adapter: Path, directory: Path) -> tuple[RunConfig, RankPlan]:
    config = run_config(adapter).model_copy(update={"directory": str(directory)})
    plan = rank_plan(config, 1)
    assert plan
    return config, plan


def test_a_checkpoint_holds_weights_and_moments_of_both_models_and_the_export(
    adapter: Path,
) -> None:
    _, plan = config_in(adapter, adapter)
    count = plan.parameters
    assert checkpoint_bytes(plan) == 2 * count * (4 + 4 + 4) + count * 4
    assert most_bytes(plan, 2) == 3 * checkpoint_bytes(plan) + 4 * count * 4


def test_check_tells_the_room_beside_what_is_free(adapter: Path, tmp_path: Path) -> None:
    config, plan = config_in(adapter, tmp_path / "run")
    (line,) = room_lines(config, plan)
    assert (
        f"up to {most_bytes(plan, config.checkpoint.keep) / MIB:,.1f} MiB (2 + 1 checkpoints of"
        in line
    )
    assert line.endswith("MiB are free")


def test_a_run_that_cannot_fit_is_refused_and_what_it_holds_counts_as_room(
    adapter: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 16 * MIB) as disk:
        config, plan = config_in(adapter, disk.path / "run")
        needed = most_bytes(plan, config.checkpoint.keep)
        check_room(config)
        disk.fill(needed // 2)
        with pytest.raises(
            ConfigError,
            match=r"has no room for the run: it takes up to .* are free and 0\.0 MiB are its",
        ):
            check_room(config)
        assert room_lines(config, plan)[1].startswith(
            "warning: on this host the run would be refused: the disk of"
        )
        disk.make_room()
        held = disk.path / "run" / "checkpoints" / "step_00000001"
        held.mkdir(parents=True)
        (held / "actor.safetensors").write_bytes(b"\0" * needed)
        disk.fill(needed // 2)
        check_room(config)
