"""The real thing on real models.

Processes, sockets, DeepSpeed, transformers; and what happens when parts of it are killed.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from prefixrl.common.errors import PeerLost
from support.runs.run_helper import (
    RUN_FILE,
    SMALL,
    check_books,
    child,
    finish,
    inspect,
    launched,
    status,
    trained_iterations,
    wait_for,
)

pytestmark = pytest.mark.timeout(400)

FIGURES = {
    *("reward", "reward_std", "all_right_groups_fraction", "all_wrong_groups_fraction"),
    *("clip_fraction", "approx_kl", "reference_kl", "entropy", "explained_variance"),
    *("actor_grad_norm", "critic_grad_norm", "policy_loss", "value_loss"),
    *("importance", "importance_ess_fraction", "importance_capped_fraction", "ratio"),
    *("behaviour_gap", "truncated_fraction", "steps_left_out"),
}
TWO_SCORERS = ("algorithm.iterations=24", "launch.scorers=2", "broker.silence_s=6")
"""Patient with those that are slow to beat."""


def scorer(directory: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "prefixrl.scorer", "--run", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ready(directory: Path) -> set[int]:
    """Process ids of the workers that have loaded."""
    return {each["pid"] for each in status(directory)["workers"] if each["engine"]}


@pytest.fixture
def newcomer() -> Iterator[Callable[["subprocess.Popen[bytes]"], "subprocess.Popen[bytes]"]]:
    """Keeps processes in mind that must not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def keep(process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
        started.append(process)
        return process

    yield keep
    for each in started:
        each.kill()
        each.wait()


def check_metrics(directory: Path) -> None:
    """Every figure that an iteration reports, on the newest line, and none that cannot be."""
    line = json.loads((directory / "metrics.jsonl").read_bytes().splitlines()[-1])
    assert set(line["figures"]) >= FIGURES, FIGURES - set(line["figures"])
    assert set(line["histograms"]) == {
        *("advantage", "age", "token_age", "log_importance", "log_ratio")
    }
    stages = line["stages"]
    assert stages["sampling_s"] > 0 and stages["scoring_s"] > 0
    assert stages["queued_s"] >= 0 and stages["waiting_s"] >= 0
    assert all(line["tokens_per_s"][role] > 0 for role in ("rollout", "scorer", "learner"))
    assert all(0 < line["busy_fraction"][role] <= 1 for role in ("rollout", "scorer", "learner"))
    assert 0 <= line["engine_mismatch"] < 1e-3 and line["ranks"]["tokens_per_s/0"] > 0
    assert set(line["waited_for_s"]) <= {"rollouts", "scorers", "report"}
    # A scorer that loads on a busy machine may be taken for lost, too.
    assert line["losses"]["scorer: lost"] >= 1 and line["ended"] == {}


@pytest.mark.chaos
def test_a_killed_scorer_is_made_good_and_newcomers_get_work(
    tmp_path: Path, newcomer: Callable[["subprocess.Popen[bytes]"], "subprocess.Popen[bytes]"]
) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SMALL, *TWO_SCORERS) as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "the second iteration")
        victim = wait_for(lambda: child(process, "prefixrl-scorer"), "a scorer")
        victim.kill()
        newcomers = [newcomer(scorer(directory)) for _ in range(2)]
        pids = {each.pid for each in newcomers}
        # The run stands still while they load: else it might be over before they have on a busy machine.
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        learner.suspend()
        try:
            wait_for(lambda: pids <= ready(directory), "both newcomers", timeout_s=180.0)
        finally:
            learner.resume()
        waited: dict[int, float] = {}

        def both_have_worked() -> bool:
            for worker in status(directory)["workers"]:
                if worker["pid"] in pids and worker["first_lease_after_ready_s"] is not None:
                    waited[worker["pid"]] = worker["first_lease_after_ready_s"]
            return len(waited) == 2

        wait_for(both_have_worked, "work for both newcomers")
        summary = finish(process, directory)
        for each in newcomers:
            assert each.wait(30) == 0
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 24 * 16
    assert summary["losses"]["scorer: lost"] >= 1
    check_metrics(directory)


def pids_by_name(directory: Path) -> dict[str, int]:
    try:
        return {each["name"]: each["pid"] for each in status(directory)["workers"]}
    except subprocess.CalledProcessError as error:
        if error.returncode != PeerLost.exit_code:
            raise
        return {}  # a broker that was killed is not back yet


@pytest.mark.slow
def test_a_killed_broker_comes_back_with_its_books_and_the_run_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SMALL, *TWO_SCORERS, "algorithm.iterations=40") as process:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        before = pids_by_name(directory)
        # A learner that is stopped meanwhile: the run must not be over before the successor has started.
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        learner.suspend()
        psutil.Process(before["scorer-0"]).kill()
        wait_for(
            lambda: pids_by_name(directory).get("scorer-0") not in (None, before["scorer-0"]),
            "its successor",
        )
        known = pids_by_name(directory)
        learner.resume()
        assert known.keys() == {"rollout-0", "scorer-0", "scorer-1"}
        wait_for(lambda: child(process, "prefixrl-broker"), "the broker").kill()
        # Launch, its logs and every broker know a worker by one name.
        wait_for(lambda: pids_by_name(directory) == known, "the same names")
        summary = finish(process, directory)
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 40 * 16
    assert "starting it again" in (directory / "logs/learner.log").read_text()


@pytest.mark.slow
def test_a_killed_learner_resumes_and_trains_the_recorded_batches_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(
        directory, *SMALL, "algorithm.iterations=12", "checkpoint.every=4", "checkpoint.growth=2"
    ) as process:
        wait_for(lambda: trained_iterations(directory) >= 7, "the seventh iteration")
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        workers = [child(process, f"prefixrl-{role}") for role in ("rollout", "scorer")]
        recorded = (directory / "metrics.jsonl").read_text().splitlines()
        learner.kill()
        wait_for(lambda: trained_iterations(directory) >= 10, "the resumed run")
        assert all(each is not None and each.is_running() for each in workers), (
            "workers must stay warm"
        )
        summary = finish(process, directory)
    check_books(summary, directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 12
    times_s = [json.loads(line)["since_start_s"] for line in lines]
    assert times_s == sorted(times_s)
    assert summary["wall_s"] >= times_s[-1]
    # Iterations 4 to 6 were trained twice over, on the same groups from the same state: bitwise the same figures.
    for before, after in zip(recorded[4:7], lines[4:7], strict=True):
        assert figures(before) == figures(after)
    kept = sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*"))
    assert kept == [1, 2, 4, 8, 12]


def figures(line: str) -> str:
    match = re.search(r'"figures":\{[^}]*\}', line)
    assert match
    return match.group()


@pytest.mark.slow
def test_ctrl_c_stops_everything_and_the_next_launch_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SMALL, "algorithm.iterations=10", "checkpoint.every=0") as process:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        deadline_s = time.monotonic() + 5
        while any(each.is_running() for each in family) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not [each for each in family if each.is_running()]
    done = trained_iterations(directory)
    assert 3 <= done < 10
    with launched(directory, *SMALL, "algorithm.iterations=10", "checkpoint.every=0") as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert trained_iterations(directory) == 10
    assert {line["version_trained"] for line in inspect(directory)} == set(range(10))


@pytest.mark.nightly
def test_a_learner_that_is_told_to_stop_with_all_its_processes_saves_and_the_next_launch_goes_on(
    tmp_path: Path,
) -> None:
    """As by SLURM, which sends SIGTERM to every process of a step."""
    directory = tmp_path / "run"
    settings = (*SMALL, "algorithm.iterations=10", "checkpoint.every=0")
    with launched(directory, *settings) as process:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        everyone = [learner, *learner.children(recursive=True)]
        assert {"prefixrl-broker", "prefixrl-weights"} <= {each.cmdline()[0] for each in everyone}
        for each in everyone:
            each.terminate()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "the learner was asked to stop; run `prefixrl launch" in output, "its exit code was 143"
    assert "again to resume" in output
    said = (directory / "logs/learner.log").read_text()
    assert "iterations, not finished; everything is saved" in said
    assert "starting it again" not in said
    assert 3 <= trained_iterations(directory) < 10
    with launched(directory, *settings) as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    assert trained_iterations(directory) == 10


@pytest.mark.chaos
def test_a_stop_while_the_last_version_is_judged_is_heard_and_the_next_launch_judges_it(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    settings = (*SMALL, "algorithm.iterations=2")
    with launched(directory, *settings) as process:
        scorer = wait_for(lambda: child(process, "prefixrl-scorer"), "the scorer")
        wait_for(lambda: trained_iterations(directory) == 2, "the last iteration")
        # Nothing can be judged any more, so that the end cannot come first.
        scorer.suspend()
        wait_for(lambda: (directory / "checkpoints/step_00000002").exists(), "the last checkpoint")
        learner = wait_for(lambda: child(process, "prefixrl-learner"), "the learner")
        learner.terminate()
        learner.wait(120)  # one that heard nothing would wait for evaluation.timeout_s, an hour
        scorer.resume()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "stopped as asked after 2 iterations" in (directory / "logs/learner.log").read_text()
    assert not (directory / "summary.json").exists()
    with launched(directory, *settings) as process:
        summary = finish(process, directory)
    assert set(summary["accuracy"]) >= {"no_prefix", "fixed_prefix", "trained_adapter"}


@pytest.mark.chaos
def test_workers_that_are_told_to_go_by_somebody_else_are_made_good(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *SMALL, "algorithm.iterations=16") as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "the second iteration")
        for role in ("rollout", "scorer"):
            wait_for(lambda role=role: child(process, f"prefixrl-{role}"), role).terminate()
        output, _ = process.communicate(timeout=360)
    assert process.returncode == 0, output
    for name in ("rollout-0", "scorer-0"):
        assert f"{name} ended with exit code 0: starting it again (1)" in output
    assert trained_iterations(directory) == 16


@pytest.mark.slow
def test_every_problem_of_an_epoch_is_trained_and_the_last_iteration_may_be_small(
    tmp_path: Path,
) -> None:
    example = RUN_FILE.parent
    (tmp_path / "train.jsonl").write_text(
        "".join((example / "train.jsonl").read_text().splitlines(True)[:20])
    )
    for name in ("adapter", "target", "heldout.jsonl"):
        (tmp_path / name).symlink_to(example / name)
    text = RUN_FILE.read_text().replace("iterations = 100\n", "")
    assert "iterations" not in text
    (tmp_path / "run.toml").write_text(text)
    directory = tmp_path / "run"
    settings = (
        *(each for each in SMALL if "iterations" not in each),
        "data.epochs=1",
        "rollout.groups_per_task=3",
    )
    with launched(directory, *settings, run_file=tmp_path / "run.toml") as process:
        summary = finish(process, directory)
    check_books(summary, directory)
    lines = inspect(directory)
    assert [sum(line["version_trained"] == t for line in lines) for t in range(2)] == [16, 4]
    assert len({line["prompt_id"] for line in lines}) == 20
