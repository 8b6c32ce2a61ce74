"""Sweeps: the grid of a file, its runs one after another, and their table."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import STOP_SIGNALS, write_atomically
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.launch.launch import STOPPED
from prefixrl.deploy.sweep import conduct, grid, outcome
from support.models.tiny_model import run_config
from support.runs import runs_on_disk
from support.runs.run_helper import RUN_FILE

HEAD = f"run = {json.dumps(str(RUN_FILE))}\ndirectory = 'runs'\n"
TWO_BLOCKS = """
[set]
algorithm.iterations = 2
learner.adam_betas = [0.9, 0.99]

[[block]]
learner = { actor_lr = [1e-4, 1e-3], adam_betas = [[0.9, 0.95]] }
seed = [1, 2]

[[block]]
algorithm.name = "rloo"
"""
TINY = """
[set]
algorithm.iterations = 2
algorithm.groups_per_iteration = 8
scorer.engine = "simulated"
evaluation.problems = 16
evaluation.selection_problems = 8
evaluation.sampled_candidates = 0
launch.scorers = 1

[[block]]
learner.actor_lr = [1e-4, 1e-3]
seed = [1, 2]
"""


def sweep_file(folder: Path, text: str, head: str = HEAD) -> Path:
    path = folder / "sweep.toml"
    path.write_text(head + text)
    return path


def prefixrl(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prefixrl.deploy", "sweep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_block_is_every_combination_and_the_last_key_changes_fastest(tmp_path: Path) -> None:
    sweep = grid.read(sweep_file(tmp_path, TWO_BLOCKS))
    rates = [(run.values.get("learner.actor_lr"), run.values.get("seed")) for run in sweep.runs]
    assert rates == [(1e-4, 1), (1e-4, 2), (1e-3, 1), (1e-3, 2), (None, None)]
    third, last = sweep.config(sweep.at(2)), sweep.config(sweep.at(4))
    assert (third.learner.actor_lr, third.learner.adam_betas, third.seed) == (1e-3, (0.9, 0.95), 1)
    assert (last.algorithm.name, last.learner.adam_betas, last.algorithm.iterations) == (
        "rloo",
        (0.9, 0.99),
        2,
    )
    assert third.directory == str(tmp_path / "runs/002") and third.adapter.model == str(
        RUN_FILE.parent / "adapter"
    )


def test_an_index_is_the_same_folder_wherever_the_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(tmp_path, TWO_BLOCKS)
    before = [run.directory for run in grid.read(path).runs]
    monkeypatch.chdir("/")
    assert [run.directory for run in grid.read(path).runs] == before


@pytest.mark.parametrize("index", [-1, 5, 500])
def test_an_index_beyond_the_grid_is_refused(tmp_path: Path, index: int) -> None:
    done = CliRunner().invoke(
        main, ["sweep", str(sweep_file(tmp_path, TWO_BLOCKS)), "--index", str(index)]
    )
    assert done.exit_code == 2 and f"--index {index}: the sweep" in done.stderr
    assert "has 5 runs, 0 to 4" in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "blocks = 1\n",
            "blocks: Extra inputs are not permitted; known are the paths run and directory",
            id="an unknown section",
        ),
        pytest.param(
            "[block]\nseed = 1\n", "each block as [[block]]", id="one table instead of a list"
        ),
        pytest.param("[[block]]\nseed = []\n", "seed = []: no value to try", id="no value"),
        pytest.param(
            "[[block]]\nseed = [1, 2, 1]\n",
            "the runs 0 and 2 are the same, seed = 1",
            id="the same run twice",
        ),
        pytest.param(
            "[set]\ndirectory = 'elsewhere'\n", "each run has a folder of its own", id="a directory"
        ),
        pytest.param(
            "[[block]]\nalgorithm.kl = [0.1, -1]\n", "run 1 of", id="a value out of range"
        ),
        pytest.param("[[block]]\nlearner.lr = [1e-4]\n", "did you mean", id="a misspelt key"),
        pytest.param("[[block\n", "is not valid TOML", id="no TOML"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused_before_anything_begins(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        conduct.conduct(grid.read(sweep_file(tmp_path, text)))
    assert said in str(refused.value) and not (tmp_path / "runs").exists()


def test_the_table_has_every_run_and_means_over_seeds_the_best_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = grid.read(sweep_file(tmp_path, TINY + "\n[[block]]\nalgorithm.kl = 0.1\n"))
    for index, accuracy in enumerate((0.5, 0.6, 0.7, 0.8)):
        runs_on_disk.finish(
            runs_on_disk.made(tmp_path / f"runs/{index:03d}", tmp_path / "adapter", 2), accuracy
        )
    outcome.print_tables(sweep)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[-1] for line in lines[2:6]] == ["0.500", "0.600", "0.700", "0.800"]
    assert lines[6][:4] == ["4", "0.1", "not", "begun"]
    # Two seeds: the t-interval is 12.7 standard errors to each side, cut at 0 and 1.
    assert [line for line in lines if line[:2] in (["2,", "3"], ["0,", "1"])] == [
        ["2,", "3", "0.001", "0.750", "0.115", "to", "1.000"],
        ["0,", "1", "0.0001", "0.550", "0.000", "to", "1.000"],
    ]


def test_a_run_that_finished_with_other_settings_is_not_taken_for_that_of_the_sweep(
    tmp_path: Path,
) -> None:
    sweep = grid.read(sweep_file(tmp_path, TINY))
    run = runs_on_disk.made(sweep.runs[0].directory, tmp_path / "adapter", 2)
    config = sweep.config(sweep.runs[0])
    before = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"kl": 0.25})}
    )
    write_atomically(run / "config.json", before.model_dump_json())
    runs_on_disk.finish(run, 0.5)
    with pytest.raises(
        ConfigError, match=r"finished run with other settings: algorithm\.kl: 0\.25 ->"
    ):
        conduct.run_one(sweep, sweep.runs[0])
    write_atomically(run / "config.json", config.model_dump_json())
    assert conduct.run_one(sweep, sweep.runs[0]) == 0
    assert run_config(tmp_path / "adapter") != config


def conducted(file: Path) -> int:
    """The exit code of a sweep in this process, whose handlers of signals are its own again afterwards."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        return conduct.conduct(grid.read(file))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_between_two_runs_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, ...]] = []

    def launch(
        _: Path, settings: tuple[str, ...], fresh: bool, stop: threading.Event | None
    ) -> int:
        launched.append(settings)
        os.kill(
            os.getpid(), signal.SIGTERM
        )  # behind the end of the run, while its table is written
        return 0

    monkeypatch.setattr(conduct, "launch", launch)
    assert conducted(sweep_file(tmp_path, TWO_BLOCKS)) == STOPPED
    assert len(launched) == 1


def test_a_member_that_cannot_begin_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[int] = []

    def run_one(_sweep: grid.Sweep, run: grid.SweptRun, _stop: threading.Event) -> int:
        begun.append(run.index)
        (run.directory / "logs").mkdir(parents=True)
        return 0

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/000").write_text("a file")
    monkeypatch.setattr(conduct, "run_one", run_one)
    assert conducted(sweep_file(tmp_path, TINY)) == conduct.SOME_FAILED
    assert begun == [0, 1, 2, 3] and "runs that did not end well: 0;" in capsys.readouterr().out


def test_a_setting_may_hold_tables(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1 =", "answer": 2}\n')
    sources = f"[[{{ path = '{tmp_path}/a.jsonl', weight = 2.0 }}, {{ path = '{tmp_path}/b.jsonl', weight = 1.0 }}]]"
    sweep = grid.read(sweep_file(tmp_path, f"[[block]]\ndata.train = {sources}\n"))
    (source, other) = sweep.config(sweep.runs[0]).data.train
    assert (source.path, source.weight, other.path) == (
        f"{tmp_path}/a.jsonl",
        2.0,
        f"{tmp_path}/b.jsonl",
    )


def test_an_array_has_a_task_per_run_with_the_resources_of_the_largest(tmp_path: Path) -> None:
    blocks = "[set]\nslurm.scorer.cpus = 2\nlearner.device='cpu'\nrollout.device='cpu'\nscorer.device='cpu'\n"
    script = conduct.job_script(
        grid.read(sweep_file(tmp_path, f"{blocks}[[block]]\nlaunch.scorers = [1, 3]\n"))
    )
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --cpus-per-task=18\n" in script
    assert f'-- prefixrl sweep {tmp_path}/sweep.toml --index "$SLURM_ARRAY_TASK_ID"\n' in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_four_runs_end_with_their_table_and_nothing_is_run_again(tmp_path: Path) -> None:
    path = sweep_file(tmp_path, TINY)
    alone = prefixrl(path, "--index", 2)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    whole = prefixrl(path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert f"run 2 of 4, {tmp_path}/runs/002: finished before" in whole.stdout
    assert whole.stdout.count("finished   2/2") == 4 and "2, 3   0.001" in whole.stdout
    again = prefixrl(path)
    assert again.returncode == 0 and again.stdout.count("finished before") == 4
    for index in range(4):
        assert len((tmp_path / f"runs/{index:03d}/starts.jsonl").read_text().splitlines()) == 1
        assert len((tmp_path / f"runs/{index:03d}/metrics.jsonl").read_text().splitlines()) == 2
    assert prefixrl(path, "--table").stdout in again.stdout
