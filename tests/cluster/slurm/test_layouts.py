"""The cluster takes the scripts of both layouts; what could never run is refused before anything is submitted."""

from pathlib import Path

import pytest

from cluster.slurm.on_slurm import ON_A_CPU, prefixrl, run_command, states
from prefixrl.deploy.slurm.jobs import script_path, write_scripts
from prefixrl.deploy.slurm.submit import Layout, run_on_slurm, scripts_of
from support.runs.run_helper import RUN_FILE

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("layout", ["arrays", "het"])
def test_every_script_can_be_submitted_from_a_folder_with_an_odd_name(
    cluster: Path, tmp_path: Path, layout: Layout
) -> None:
    directory = tmp_path / 'it\'s a "run" #1, 50%'
    settings = (
        *ON_A_CPU,
        f"directory={directory}",
        "slurm.time=1:00:00",
        "slurm.scorer.gpus=1",
        "launch.scorers=2",
    )
    scripts = scripts_of(run_on_slurm(RUN_FILE, settings), layout)
    write_scripts(directory, scripts)
    for name in scripts:
        done = run_command("sbatch", "--test-only", str(script_path(directory, name)))
        assert done.returncode == 0, done.stderr
        assert "to start at" in done.stderr


@pytest.mark.parametrize("layout", ["arrays", "het"])
def test_a_job_that_could_never_run_is_one_message_and_nothing_is_submitted(
    cluster: Path, tmp_path: Path, layout: str
) -> None:
    flags = ["--set", f"directory={tmp_path}/run", "--set", "slurm.scorer.cpus=640"]
    done = prefixrl("slurm", str(RUN_FILE), "--submit", "--layout", layout, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sbatch failed with exit code 1: ")
    assert "Requested node configuration is not available" in done.stderr
    assert states() == {}


def test_a_run_without_jobs_cannot_be_scaled(cluster: Path, tmp_path: Path) -> None:
    done = prefixrl("scale", str(tmp_path), "scorers", "2")
    assert done.returncode == 2
    assert "holds no run that was submitted to SLURM" in done.stderr
