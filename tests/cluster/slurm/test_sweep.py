"""A sweep as an array of SLURM: every task is a whole run."""

import json
from pathlib import Path

import pytest

from cluster.slurm.on_slurm import ON_A_CPU, prefixrl, states
from support.runs.run_helper import RUN_FILE, logs, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def sweep_file(folder: Path) -> Path:
    pairs = (each.split("=", 1) for each in ON_A_CPU)
    settings = "\n".join(
        f"{key} = {value if value.isdigit() else json.dumps(value)}" for key, value in pairs
    )
    path = folder / "sweep.toml"
    path.write_text(
        f"run = {json.dumps(str(RUN_FILE))}\ndirectory = 'runs'\n[set]\n{settings}\n"
        "algorithm.iterations = 2\nalgorithm.groups_per_iteration = 8\nlaunch.scorers = 1\n"
        "evaluation.problems = 16\nevaluation.selection_problems = 8\nevaluation.sampled_candidates = 0\n"
        "scorer.engine = 'simulated'\n[[block]]\nlearner.actor_lr = [1e-4, 1e-3]\nseed = [1, 2]\n"
    )
    return path


def test_an_array_of_four_runs_ends_with_its_table_and_is_not_submitted_again(
    cluster: Path, tmp_path: Path
) -> None:
    path = sweep_file(tmp_path)
    first = prefixrl("sweep", str(path), "--index", "3")
    assert first.returncode == 0, first.stderr
    submitted = prefixrl("sweep", str(path), "--submit")
    assert submitted.returncode == 0 and "runs 0-2 of" in submitted.stdout, submitted.stderr
    twice = prefixrl("sweep", str(path), "--submit")
    assert twice.returncode == 2 and "is in the queue" in twice.stderr
    summaries = [tmp_path / f"runs/00{index}/summary.json" for index in range(4)]
    said = (tmp_path / "runs/slurm").glob("*.log")
    try:
        wait_for(lambda: all(each.exists() for each in summaries), "four runs", 300)
        wait_for(lambda: not states(), "the end of the jobs", 90)
    except AssertionError as error:
        shown = "\n".join(each.read_text() for each in said)
        raise AssertionError(
            f"{error}\n{states()}\n{shown}\n{logs(tmp_path / 'runs/000')}"
        ) from None
    table = prefixrl("sweep", str(path), "--table").stdout
    assert table.count("finished   2/2") == 4 and "2, 3   0.001" in table
    again = prefixrl("sweep", str(path), "--submit")
    assert again.returncode == 2 and "is finished; --table shows them" in again.stderr
