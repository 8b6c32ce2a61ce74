"""`prefixrl workers`, `prefixrl stop`: against a real broker with real worker processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost, TrainingFault
from prefixrl.common.host.process import own
from prefixrl.common.wire.messages.learner import GetBatch, Halt, HaltRun
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands import stop_and_drain as fleet
from prefixrl.learner.broker.workers.workers import Phase
from support.fakes import endpoint_of, learner, peers, run_on_disk, serving, wait_until
from support.runs.runs_on_disk import write_end


def cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def scorer(config: RunConfig) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "prefixrl.scorer", "--run", config.directory]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_workers_are_listed_and_one_that_is_drained_leaves_with_exit_code_0(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, scorer={"engine": "simulated", "max_new_tokens": 8})
    directory = Path(config.directory)
    with serving(config) as broker:
        processes = [scorer(config) for _ in range(2)]
        try:
            wait_until(
                lambda: (
                    sum(
                        each.phase is Phase.READY
                        for each in list(broker.dispatcher.registry.by_identity.values())
                    )
                    == 2
                ),
                "two scorers",
                timeout_s=60.0,
            )
            listed = cli("workers", directory).output
            assert "scorer-0" in listed and "scorer-1" in listed
            assert all(str(each.pid) in listed for each in processes)
            pid = {each.name: each.pid for each in fleet.workers(directory)}["scorer-1"]
            drained = cli("workers", directory, "drain", "scorer-1")
            assert drained.exit_code == 0 and "scorer-1 has left" in drained.output, drained.output
            assert "last scorer" not in drained.output
            (gone,) = [each for each in processes if each.pid == pid]
            assert gone.wait(30) == 0 and gone.stderr is not None
            assert "the operator wants this worker to leave" in gone.stderr.read()
            assert [each.name for each in fleet.workers(directory)] == ["scorer-0"]
            assert "the last scorer" in cli("workers", directory, "drain", "scorer-0").output
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def test_a_worker_that_does_not_leave_in_time_is_named_with_what_it_does(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    with serving(config), peers(endpoint_of(config), "s") as (silent,):
        silent.ready(config, "scorer")
        with pytest.raises(
            PeerLost, match=r"scorer-0 \(host pid 4711\) has not left within 0.5 s; it is leaving"
        ):
            fleet.drain(Path(config.directory), "scorer-0", 0.5)


def test_what_cannot_be_drained_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    with serving(config), peers(endpoint_of(config), "s") as (one,):
        one.ready(config, "scorer")
        refused = cli("workers", config.directory, "drain", "scorer-9")
        assert refused.exit_code == 2 and "no worker 'scorer-9'; it has scorer-0" in refused.output
        assert cli("workers", config.directory, "drain").exit_code == 2


def test_a_stop_reaches_the_learner_through_its_broker_and_ends_with_how_it_ended(
    tmp_path: Path,
) -> None:
    config = run_on_disk(tmp_path)
    directory = Path(config.directory)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        zero.say(GetBatch(0, 0, 1))
        if len(told) == 1:
            assert zero.hear(Halt).iteration == 0
            lock.close()
            write_end(directory, 143, "stopped as asked")

    lock = own(directory)
    with serving(config), peers(endpoint_of(config), "zero") as (zero,):
        learner(zero)
        fleet.stop(directory, 60.0, tell)
    assert told[0] == "asked the learner to save and stop"
    assert told[-1].startswith("stopped at iteration 0 of 5, and saved")


def test_a_stop_that_takes_too_long_names_who_holds_it_up(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    directory = Path(config.directory)
    with serving(config), own(directory), peers(endpoint_of(config), "s") as (one,):
        one.ready(config, "scorer")
        with pytest.raises(
            PeerLost, match="has not stopped within 0 s; the learner trains iteration 1 of 5"
        ):
            fleet.stop(directory, 0.0, lambda _: None)
        partial = directory / "checkpoints/.step_00000002.partial"
        partial.mkdir(parents=True)
        (partial / "actor").write_bytes(bytes(3 * 2**20))
        with pytest.raises(
            PeerLost, match=r"the learner is saving \(.step_00000002.partial, 3.0 MiB so far\)"
        ):
            fleet.stop(directory, 0.0, lambda _: None)


def test_a_broker_that_starts_anew_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ASK_EVERY_S", 0.0)
    config = run_on_disk(tmp_path)
    directory = Path(config.directory)
    lock = own(directory)

    with serving(config) as broker:
        broker.batches.is_halting = False

        def tell(_: str) -> None:
            broker.batches.is_halting = False  # as of a new broker

        def halted(reason: str) -> None:
            asked.append(reason)
            if len(asked) > 1 and not lock.closed:
                lock.close()
                write_end(directory, 143, "stopped as asked")

        asked: list[str] = []
        monkeypatch.setattr(broker.batches, "halt", halted)
        fleet.stop(directory, 60.0, tell)
    assert len(asked) > 1 and HaltRun(asked[0])


def test_a_stop_that_could_not_save_is_no_success(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    directory = Path(config.directory)
    with serving(config), own(directory) as lock:

        def tell(_: str) -> None:
            lock.close()
            write_end(directory, 5, "the disk is full")

        with pytest.raises(
            TrainingFault, match=r"not stop in order: failed at .* exit code 5, the disk is full"
        ):
            fleet.stop(directory, 60.0, tell)


@pytest.mark.parametrize("command", ["stop", "workers"])
def test_a_run_that_has_ended_is_refused_with_how_it_ended(command: str, tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    (Path(config.directory) / "endpoint").write_text("tcp://127.0.0.1:9")
    write_end(Path(config.directory), 143, "stopped as asked")
    with pytest.raises(ConfigError, match="is not running: stopped at iteration 0 of 5"):
        fleet.workers(Path(config.directory))
    assert cli(command, config.directory).exit_code == 2
