"""Checkpoints that stay: newest, milestones, the best; and a kill between any two steps of their removal."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config.load import load
from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.evaluation.accuracy import Point
from prefixrl.common.journal.crash_points import FOLDER_VARIABLE, VARIABLE
from prefixrl.deploy.runs.checkpoints import served_checkpoint
from prefixrl.learner.run.retention import is_milestone, milestones, prune, ranked, removable
from support.runs.run_helper import RUN_FILE

GROWTH = st.none() | st.floats(1.001, 10)


def curve(*accuracies: tuple[int, float]) -> list[Point]:
    return [Point(version, accuracy, (0.0, 1.0)) for version, accuracy in accuracies]


def saved(directory: Path, *iterations: int) -> None:
    """Folders of checkpoints with two files each."""
    for iteration in iterations:
        (directory / f"step_{iteration:08d}").mkdir(parents=True)
        for name in ("manifest.json", "weights"):
            (directory / f"step_{iteration:08d}" / name).write_text(name)


def whole(directory: Path) -> list[int]:
    """The checkpoints that are there, all of them with all their files."""
    folders = sorted(directory.glob("step_*"))
    assert all(len(list(folder.iterdir())) == 2 for folder in folders)
    return [int(folder.name[5:]) for folder in folders]


def test_steps_grow_by_the_factor_rounded_up() -> None:
    assert milestones(20, 2) == [1, 2, 4, 8, 16]
    assert milestones(13, 1.5) == [1, 2, 3, 5, 8, 12]
    assert milestones(0, 2) == milestones(100, None) == []


@given(st.integers(0, 200), GROWTH)
def test_an_iteration_is_a_milestone_of_every_longer_run_or_of_none(
    iteration: int, growth: float | None
) -> None:
    assert is_milestone(iteration, growth) == (iteration in milestones(200, growth))


@given(st.integers(1, 60), st.integers(1, 5), GROWTH)
def test_after_every_step_the_newest_and_all_milestones_are_there(
    last: int, keep: int, growth: float | None
) -> None:
    there: set[int] = set()
    kept = CheckpointConfig(keep=keep, growth=growth)
    for iteration in range(1, last + 1):
        there.add(iteration)
        there -= set(removable(there, kept))
    assert there == set(milestones(last, growth)) | set(range(max(1, last - keep + 1), last + 1))


def test_the_best_is_judged_has_a_checkpoint_and_is_the_earlier_of_equals() -> None:
    judged = curve((0, 0.9), (2, 0.7), (4, 0.5), (6, 0.7), (8, 0.2))
    assert ranked([1, 2, 4, 6, 8], judged) == [2, 6, 4, 8]
    assert ranked([4, 8, 9], judged) == [4, 8]


def test_the_best_and_the_awaited_stay_and_a_link_names_the_best(tmp_path: Path) -> None:
    kept = CheckpointConfig(keep=1, keep_best=2)
    saved(tmp_path, 1, 2, 3, 4, 5)
    assert prune(tmp_path, kept, curve((2, 0.3), (1, 0.2), (4, 0.1)), awaited={3}) == [4]
    assert (
        whole(tmp_path) == [1, 2, 3, 5]
        and (tmp_path / "best").resolve() == tmp_path / "step_00000002"
    )
    assert prune(tmp_path, kept, curve((2, 0.3), (1, 0.2), (3, 0.4))) == [1]
    assert (
        whole(tmp_path) == [2, 3, 5] and (tmp_path / "best").resolve() == tmp_path / "step_00000003"
    )
    assert prune(tmp_path, CheckpointConfig(keep=1)) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000005"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [((), 0), (("evaluation.every=5",), 1), (("evaluation.every=5", "checkpoint.keep_best=0"), 0)],
)
def test_the_best_checkpoint_stays_where_versions_are_judged(
    settings: tuple[str, ...], kept: int
) -> None:
    assert load(RUN_FILE, settings).checkpointing.keep_best == kept


def test_a_run_is_used_by_its_best_checkpoint_or_by_its_latest(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 1, 2, 3)
    assert served_checkpoint(tmp_path) == "latest"
    prune(tmp_path / "checkpoints", CheckpointConfig(keep=3, keep_best=1), curve((2, 0.3)))
    assert served_checkpoint(tmp_path) == "best"


PROGRAM = """
import sys
from pathlib import Path
from prefixrl.common.config.load import load
from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.evaluation.accuracy import Point
from prefixrl.learner.run.retention import prune
judged = [Point(3, 0.1, (0, 1)), Point(5, 0.2, (0, 1))]
prune(Path(sys.argv[1]), CheckpointConfig(keep=1, keep_best=1, growth=2), judged)
"""


@pytest.mark.parametrize(
    "point",
    ["checkpoint.best", "checkpoint.removing", "checkpoint.removing:2", "checkpoint.pruned"],
)
def test_a_kill_at_any_step_leaves_whole_checkpoints_and_the_next_removal_ends_it(
    tmp_path: Path, point: str
) -> None:
    directory, crashed = tmp_path / "checkpoints", tmp_path / "crashed"
    crashed.mkdir()
    saved(directory, 1, 3, 4, 5, 6, 7, 9)
    (directory / "best").symlink_to("step_00000003")
    environment = {"PATH": "", VARIABLE: point, FOLDER_VARIABLE: str(crashed)}
    command = [sys.executable, "-c", PROGRAM, str(directory)]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert {1, 4, 5, 9} <= set(whole(directory)) and (directory / "best/weights").exists()
    assert subprocess.run(command, env=environment).returncode == 0
    assert (
        whole(directory) == [1, 4, 5, 9]
        and (directory / "best").resolve() == directory / "step_00000005"
    )
