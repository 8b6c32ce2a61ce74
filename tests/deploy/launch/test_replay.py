"""`prefixrl replay`: the learner alone, on the samples of a run; with its settings it makes the run's parameters."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from prefixrl.common.config.load import changed
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.evaluation.plans import PLAN_FILE as EVALUATION_FILE
from prefixrl.common.run.documents import metrics_of, summary_of
from prefixrl.common.run.replay import PLAN_FILE, plan_of
from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.deploy.commands.list_command import comparison, listing
from prefixrl.deploy.launch.launch import launch
from prefixrl.deploy.launch.replay_command import replay
from prefixrl.deploy.launch.resume import resumed
from prefixrl.deploy.runs.inspect import checked
from prefixrl.deploy.view.run_state import operator, state_of
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.models.batch import iteration_data
from prefixrl.learner.models.model import Models
from prefixrl.learner.run.directory import RunDirectory
from prefixrl.learner.training.iteration import train_iteration
from support.models.tiny_model import DEEPSPEED_WARNINGS, run_config, save_model
from support.models.training import same
from support.runs.recorded_run import groups_of, record, records_of, write_journal
from support.runs.run_helper import SMALL, child, finish, launched, trained_iterations, wait_for
from support.runs.runs_on_disk import held

ITERATIONS = 4
STALE = (
    *SMALL,
    "algorithm.iterations=9",
    "algorithm.max_staleness=2",
    "algorithm.ppo_epochs=2",
    "algorithm.minibatches=3",
    "checkpoint.keep=20",
    "checkpoint.every=3",
    "broker.journal_segment_mib=0.05",
)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    algorithm = {"iterations": ITERATIONS, "ppo_epochs": 2}
    return run_config(
        save_model(tmp_path / "adapter"),
        directory=str(tmp_path / "run"),  # type: ignore[arg-type]
        algorithm=algorithm,
        checkpoint={"every": 2, "keep": 9},
    )


@pytest.fixture
def run(config: RunConfig) -> Path:
    return record(config, ITERATIONS)


def replayed(
    run: Path, *words: str, code: int = 0, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """`prefixrl replay` of a run, which ends with a code."""
    command = [sys.executable, "-m", "prefixrl.deploy", "replay", str(run), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def trained(config: RunConfig, iterations: int) -> dict[str, Tensor]:
    """Weights after the recorded batches, by the training of an iteration alone: no loop, journal or checkpoint."""
    models = Models.load(config, 0, 1, config.adapter.model)
    for iteration in range(iterations):
        groups = groups_of(iteration)
        batch = Batch(
            iteration=iteration,
            total_iterations=iterations,
            seed=derive(config.seed, "iteration", iteration),
            groups=tuple(map(batch_group, groups)),
            waited_s={},
        )
        data = iteration_data(batch, dict(enumerate(groups)))
        train_iteration(models, data, config, config.steps_in_all(0))
    return models.state_dict_for_publication()


def weights(folder: Path, iteration: int) -> dict[str, Tensor]:
    return load_file(folder / f"checkpoints/step_{iteration:08d}/hf/model.safetensors")


def files(folder: Path) -> dict[str, bytes]:
    """Content of all files below a folder, but for the lock that every look at a run takes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def table(rows: Any) -> str:
    return " ".join(" ".join(map(str, column.cells)) for column in rows.columns)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_a_replay_trains_the_recorded_batches_in_their_order_and_is_marked_as_one(
    config: RunConfig, run: Path, warned: int
) -> None:
    before = files(run)
    out = run.with_name("run_replay")
    said = replayed(run).stdout
    assert f"replay of {run}" in said and "nothing was sampled or judged" in said
    assert same(trained(config, ITERATIONS), weights(out, ITERATIONS))
    assert same(trained(config, 2), weights(out, 2))
    assert files(run) == before, "a replay writes nothing into its run"
    assert not {"endpoint", "journal", "keys", "weights"} & {path.name for path in out.iterdir()}
    assert [path.name for path in (out / "logs").iterdir()] == ["learner.log"], "no other process"
    state = state_of(out)
    assert (state.state, state.iterations, state.replay_of) == ("finished", ITERATIONS, str(run))
    assert str(state).startswith(f"replay of {run}, finished: {ITERATIONS} of {ITERATIONS}")
    assert f"finished, replay of {run}" in table(listing(run.parent))
    summary = summary_of(out)
    assert summary and summary.run_id == "replay of id of the run" and not summary.accuracy
    assert summary.groups["trained"] == 4 * ITERATIONS
    lines = metrics_of(out)
    assert [line.iteration for line in lines] == list(range(ITERATIONS))
    assert set(lines[0].tokens_per_s) == {"learner"} and lines[0].figures["rows"] == 12
    assert f"replay of {run}" in (out / "report.html").read_text()
    written = files(out)
    replayed(run)
    changed_files = {name for name, content in files(out).items() if content != written.get(name)}
    assert changed_files <= {"report.html"}, "a finished replay is not made again"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_a_replay_with_other_settings_has_its_figures_beside_those_of_the_run(
    config: RunConfig, run: Path, warned: int
) -> None:
    settings = ("learner.actor_lr=5e-4", "algorithm.iterations=3", "algorithm.name=rloo")
    out = run.with_name("half")
    replayed(run, *(word for each in settings for word in ("--set", each)), "--out", str(out))
    assert same(trained(changed(config, settings, "--set"), 3), weights(out, 3))
    assert not same(trained(config, 3), weights(out, 3))
    seen = table(comparison([run, out]))
    for words in (
        f" {run} ",
        '"gae" 4 0.001',
        '"rloo" 3 0.0005',
        "the learner in iteration",
        "entropy",
    ):
        assert words in seen
    with pytest.raises(ConfigError, match=r"holds a replay of .* with other settings"):
        replay(run, settings[:1], out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("warned", [pytest.param(0, marks=DEEPSPEED_WARNINGS)])
def test_the_command_goes_on_with_a_replay_that_was_killed(
    config: RunConfig, run: Path, tmp_path: Path, warned: int
) -> None:
    out = run.with_name("run_replay")
    marks = tmp_path / "marks"
    marks.mkdir()
    crash = {"PREFIXRL_CRASH_AT": "iteration.noted:3:hang", "PREFIXRL_CRASH_FOLDER": str(marks)}
    command = [sys.executable, "-m", "prefixrl.deploy", "replay", str(run)]
    with subprocess.Popen(
        command, env={**os.environ, **crash}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: any(marks.iterdir()), "the third iteration")
        assert state_of(out).state == "running"
        with pytest.raises(ConfigError, match=r"holds a replay of .*has no broker"), operator(out):
            pass
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: state_of(out).state == "killed", "the learner to die with its command")
    assert f"`prefixrl replay {run} --out {out}` resumes it" in str(state_of(out))
    assert not (out / "summary.json").exists(), "half a replay does not look whole"
    replayed(run)
    assert state_of(out).state == "finished"
    assert same(trained(config, ITERATIONS), weights(out, ITERATIONS))
    summary = summary_of(out)
    assert summary and summary.groups["trained"] == 4 * ITERATIONS, "earlier starts count, too"
    assert [line.iteration for line in metrics_of(out)] == list(range(ITERATIONS))


def test_another_adapter_than_the_run_began_with_is_refused(run: Path, tmp_path: Path) -> None:
    digests = {"model": "other", "tokenizer": "", "chat_template": ""}
    began = {
        "data_train": [],
        "reward_function": "",
        "algorithm_advantage_function": "",
        "adapter_model": digests,
        "target_model": None,
    }
    (run / "inputs.json").write_text(json.dumps(began))
    said = replayed(run, code=2).stderr
    assert re.search(r"adapter.model = .* holds other weights than when .*run began", said)
    assert "Traceback" not in said and not (run.with_name("run_replay") / "summary.json").exists()


# --- what is refused before anything is trained ----------------------------------------------------------------------


def test_a_journal_that_lacks_what_was_trained_is_refused(run: Path, tmp_path: Path) -> None:
    segment = run / "journal/000000.msgpack"
    whole = segment.read_bytes()
    write_journal(run, records_of(ITERATIONS - 1))
    with pytest.raises(DataError, match=r"batches of 3 iterations, and the run has trained 4"):
        replay(run, (), None)
    records = records_of(ITERATIONS)
    write_journal(run, [*records[:1], *records[2:5], *records[6:]])
    with pytest.raises(DataError, match="has no result of it before; restore the journal"):
        replay(run, (), None)
    segment.write_bytes(whole)
    segment.rename(segment.with_name("000001.msgpack"))
    with pytest.raises(DataError, match=r"000000.msgpack.zst is missing"):
        replay(run, (), None)
    (run / "journal/000001.msgpack").unlink()
    with pytest.raises(ConfigError, match="holds no samples to replay"):
        replay(run, (), None)
    assert not run.with_name("run_replay").exists()


def test_settings_that_cannot_be_and_more_iterations_than_were_trained_are_refused(
    run: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"\n  algorithm.samples_per_prompt: a group has"):
        replay(run, ("algorithm.samples_per_prompt=2",), None)
    with pytest.raises(
        ConfigError, match=r"iterations = 5: the run in .* has trained 4 iterations"
    ):
        replay(run, ("algorithm.iterations=5",), None)
    with pytest.raises(ConfigError, match="clip"):
        replay(run, ("algorithm.clip=-1",), None)
    assert not run.with_name("run_replay").exists()


def test_a_run_that_goes_on_or_of_another_format_is_refused(run: Path) -> None:
    with held(run), pytest.raises(ConfigError, match="goes on; replay it when it is finished"):
        replay(run, (), None)
    (run / "format.json").write_text('{"format": 1, "release": "0.1"}')
    with pytest.raises(ConfigError, match=r"holds a run of format 1, of release 0.1"):
        replay(run, (), None)


def test_a_folder_with_something_else_in_it_is_left_alone(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for folder in (other, run):
        with pytest.raises(ConfigError, match="is not empty and holds no replay"):
            replay(run, (), folder)
    with pytest.raises(ConfigError, match="is a file"):
        replay(run, (), other / "notes.txt")
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_nothing_is_sampled_in_the_folder_of_a_replay(config: RunConfig, run: Path) -> None:
    plan = {"source": "/runs/first", "run_id": "", "iterations": 4, "problems": 0, "parts": []}
    plan |= {"returns": {}, "functions": [], "settings": []}
    (run / PLAN_FILE).write_text(json.dumps(plan))
    assert plan_of(run) is not None
    said = "holds a replay of /runs/first, in which nothing is sampled"
    for attempt in (
        lambda: replay(run, (), None),
        lambda: resumed(run, ()),
        lambda: launch(run / "config.json", (), fresh=False),
        lambda: launch(run / "config.json", (), fresh=True),
        lambda: RunDirectory(config),
    ):
        with pytest.raises(ConfigError, match=said):
            attempt()
    (run / PLAN_FILE).rename(run / EVALUATION_FILE)
    with pytest.raises(ConfigError, match="holds an evaluation"):
        replay(run, (), None)


def test_a_replay_has_no_history_of_its_own(run: Path) -> None:
    (run / PLAN_FILE).write_text("damaged")
    with pytest.raises(DataError, match=r"replay.json"):
        checked(run)


# --- real runs -------------------------------------------------------------------------------------------------------


def checkpoints_equal(run: Path, out: Path) -> int:
    """Number of tensors of all checkpoints of a run, each of which its replay must have bitwise."""
    compared = 0
    for path in sorted((run / "checkpoints").glob("step_*/rank_*/*.safetensors")):
        if path.name == "random.safetensors":
            continue  # of the process: nothing in training draws
        theirs, mine = load_file(path), load_file(out / path.relative_to(run))
        assert theirs.keys() == mine.keys() and same(theirs, mine), path
        compared += len(theirs)
    return compared


def figures_of(directory: Path) -> list[dict[str, float]]:
    return [dict(line.figures) for line in metrics_of(directory)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stale_run_that_was_killed_resumed_and_changed_is_replayed_bitwise(
    tmp_path: Path,
) -> None:
    directory, out = tmp_path / "run", tmp_path / "run_replay"
    with launched(directory, *STALE) as process:
        wait_for(lambda: trained_iterations(directory) >= 5, "the fifth iteration")
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        learner.kill()
        finish(process, directory)
    changes = ("algorithm.iterations=12", "learner.actor_lr=1e-4", "algorithm.entropy=0.05")
    command = [sys.executable, "-m", "prefixrl.deploy", "resume", str(directory)]
    flags = [word for each in changes for word in ("--change", each)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = (directory / "starts.jsonl").read_text().splitlines()
    assert [json.loads(each)["iteration"] for each in starts] in ([0, 3, 9], [0, 6, 9])
    ages = {age for line in metrics_of(directory) for age in line.ages}
    assert ages & {"1", "2"}, "some samples were old"
    replayed(directory)
    assert checkpoints_equal(directory, out) > 100
    assert figures_of(directory) == figures_of(out)
    half = tmp_path / "half"
    replayed(directory, "--set", "learner.actor_lr=1.25e-4", "--out", str(half))
    theirs, mine = figures_of(directory), figures_of(half)
    assert [each["reward"] for each in theirs] == [each["reward"] for each in mine]
    assert all(a["entropy"] != b["entropy"] for a, b in zip(theirs[1:], mine[1:], strict=True))
    assert "0.000125" in table(comparison([directory, half]))
    first, *later = sorted((directory / "journal").iterdir())
    assert first.name == "000000.msgpack.zst" and later, "closed segments are read, too"
    first.unlink()
    said = replayed(directory, "--out", str(tmp_path / "other"), code=2).stderr
    assert f"{first} is missing" in said and "Traceback" not in said


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_of_two_ranks_is_replayed_by_two(tmp_path: Path) -> None:
    directory, out = tmp_path / "run", tmp_path / "run_replay"
    with launched(directory, *STALE, "algorithm.iterations=4", "launch.learner_ranks=2") as process:
        finish(process, directory)
    replayed(directory)
    assert {path.parent.name for path in (out / "checkpoints").glob("*/rank_*/actor*")} == {
        "rank_00000",
        "rank_00001",
    }
    assert checkpoints_equal(directory, out) > 100
