"""The published recipe as it is shipped, where memory is counted and a core that asks for none gets 100 MB."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm.on_slurm import (
    Install,
    cancel_all,
    four_nodes,
    nodes_are_free,
    prefixrl,
    queue,
    run_command,
)
from support.paths import EXAMPLES
from support.runs.run_helper import logs, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
RECIPE = EXAMPLES / "math_qwen2.5/run.toml"
STARTS = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES" >"$(mktemp {folder}/seen.XXXXXX)"; sleep 100'


@pytest.fixture(scope="module")
def whole_counting() -> Iterator[None]:
    with four_nodes(CPUS="48", GPUS="4", SELECT="CR_Core_Memory", DEFAULT_MIB="100", PORT="17917"):
        yield


@pytest.fixture
def counting(whole_counting: None) -> Iterator[None]:
    """Nodes of 48 CPUs and four GPUs that count memory."""
    yield
    cancel_all()
    wait_for(nodes_are_free, "an empty cluster", 60)


def seen(folder: Path) -> list[str]:
    """The host and the GPUs of every process that has started."""
    return [text for each in folder.glob("seen.*") if (text := each.read_text().strip())]


@pytest.mark.parametrize("layout", ["arrays", "het"])
def test_all_nine_processes_run_at_once_with_a_gpu_and_memory_of_their_own(
    counting: None, tmp_path: Path, daemons: Install, layout: str
) -> None:
    text = STARTS.format(folder=tmp_path)
    given = (
        *daemons(learner=text, rollout=text, scorer=text),
        "slurm.partition=main",
        f"directory={tmp_path}/run",
    )
    flags = [flag for each in given for flag in ("--set", each)]
    done = prefixrl("slurm", str(RECIPE), "--submit", "--layout", layout, *flags)
    assert done.returncode == 0, done.stderr
    try:
        wait_for(lambda: len(seen(tmp_path)) == 9, "nine processes", 100)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{queue()}\n{logs(tmp_path / 'run')}") from None
    assert len(set(seen(tmp_path))) == 9
    shown = run_command("squeue", "--array", "--noheader", "--Format=MinMemory,State").stdout
    assert {tuple(line.split()) for line in shown.splitlines()} == {
        (of_a_core, "RUNNING") for of_a_core in ("4352M", "5.50G", "6272M")
    }


def test_a_sweep_starts_whose_runs_fit_a_node_and_a_larger_one_is_told_what_a_node_must_have(
    counting: None, tmp_path: Path, daemons: Install
) -> None:
    (activate,) = daemons(prefixrl=STARTS.format(folder=tmp_path))
    path = tmp_path / "sweep.toml"
    shared = f"run = {json.dumps(str(RECIPE))}\ndirectory = 'runs'\n[set]\n{activate}\nslurm.partition = 'main'\n"
    path.write_text(f"{shared}[[block]]\nseed = [1, 2]\n")
    refused = prefixrl("sweep", str(path), "--submit")
    assert (
        refused.returncode == 2
        and "sweep.sbatch asks for --ntasks=1 --nodes=1 --cpus-per-task=68 --gpus" in refused.stderr
    )
    path.write_text(f"{shared}launch.scorers = 3\n[[block]]\nseed = [1, 2]\n")
    done = prefixrl("sweep", str(path), "--submit")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: len(seen(tmp_path)) == 2, "two runs", 60)
    assert {each.partition(" ")[2] for each in seen(tmp_path)} == {"0,1,2,3"}
