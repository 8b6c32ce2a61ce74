"""Workers that fall silent, hang, leave or swap weights, seen from a whole broker behind its socket."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import VersionPublished
from prefixrl.common.wire.messages import worker as messages
from prefixrl.common.wire.messages.fields import UNPROVED
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.learner import (
    Accepted,
    EvaluationProgress,
    GetEvaluation,
    Published,
)
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.packing import pack_logprobs
from prefixrl.learner.broker.server import Broker
from prefixrl.learner.broker.workers import workers
from prefixrl.learner.broker.workers.versions import PROBE_FAILURES_ALLOWED
from support import fakes
from support.messages import HELD_OUT, evaluate

SAMPLING = Sampling(temperature=0.0, max_new_tokens=4)
V1 = WeightsNote(1, "d1", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs)


def test_a_silent_worker_is_given_up_and_its_task_goes_to_another(tmp_path: Path) -> None:
    config = fakes.run_on_disk(tmp_path, broker={"heartbeat_s": 0.1, "silence_s": 0.5})
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "mute", "other") as (mute, other),
    ):
        mute.ready(config, "rollout")
        task = mute.hear(messages.PrefixTask)
        mute.hear(messages.Unknown)
        other.ready(config, "rollout")
        assert other.hear(messages.PrefixTask).groups == task.groups


def test_a_worker_that_beats_without_progress_is_given_up(tmp_path: Path) -> None:
    config = fakes.run_on_disk(tmp_path, broker={"stall_s": 0.5})
    with fakes.serving(config) as broker, fakes.peers(fakes.endpoint_of(config), "hung") as (hung,):
        hung.ready(config, "rollout")
        task = hung.hear(messages.PrefixTask)

        def given_up() -> bool:
            hung.say(
                messages.Heartbeat(progress=3, busy_row_s=0.0, leases=(task.task,), state="hung")
            )
            hung.client.receive(0.05)
            return broker.dispatcher.losses["rollout: lost"] == 1

        fakes.wait_until(given_up, "giving up")


SUSPENDED_WORKER = """
import sys, time
from support.fakes import Peer, ready
from prefixrl.common.config.load import from_json
from prefixrl.common.wire.messages.worker import Heartbeat, PrefixTask
config = from_json(open(sys.argv[1]).read())
peer = Peer(sys.argv[2], b"suspended")
peer.ready(config, "rollout")
task = peer.hear(PrefixTask)
print("holds a task", flush=True)
for progress in range(1000):
    peer.say(Heartbeat(progress=min(20, progress), busy_row_s=0.0, leases=(task.task,), state="at work"))
    time.sleep(0.1)
    while (received := peer.client.receive(0.0)) is not None:
        print(type(received[0]).__name__, flush=True)
"""


@pytest.mark.slow
def test_a_worker_suspended_past_the_deadline_of_its_task_is_unknown_and_not_refused(
    tmp_path: Path,
) -> None:
    # Longer than half of the learner's patience, shorter than the silence for which it is given up.
    slow = {"heartbeat_s": 0.2, "silence_s": 5.9, "stall_s": 3.0}
    config = fakes.run_on_disk(tmp_path, broker=slow, learner={"batch_timeout_s": 6.0})
    with fakes.serving(config) as broker:
        command = [
            sys.executable,
            "-c",
            SUSPENDED_WORKER,
            f"{config.directory}/config.json",
            fakes.endpoint_of(config),
        ]
        paths = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        with subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout and worker.stdout.readline() == "holds a task\n"
                time.sleep(1.5)  # it makes progress, so that it is not given up as hung
                worker.send_signal(signal.SIGSTOP)
                time.sleep(2.5)
                worker.send_signal(signal.SIGCONT)
                said = next(line for line in worker.stdout if line != "Beat\n")
            finally:
                worker.kill()
        assert said == "Unknown\n"
        assert broker.dispatcher.losses == {"rollout: lost": 1}


def test_a_worker_that_leaves_gives_its_task_back_at_once(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "leaving", "staying") as (leaving, staying):
        leaving.ready(config, "rollout")
        task = leaving.hear(messages.PrefixTask)
        leaving.say(messages.Goodbye("done for today"))
        # Of two connections the broker may read the later message first.
        fakes.wait_until(lambda: broker.dispatcher.losses["rollout: left"] == 1, "the leave")
        staying.ready(config, "rollout")
        assert staying.hear(messages.PrefixTask).groups == task.groups


def test_a_leaving_worker_gets_no_more_work_and_what_it_finishes_counts(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "leaving", "staying") as (leaving, staying):
        leaving.ready(config, "rollout", slots=2)
        first, second = leaving.hear(messages.PrefixTask), leaving.hear(messages.PrefixTask)
        leaving.say(messages.Leaving())
        leaving.say(messages.Refused(second.task, "this worker was asked to stop"))
        assert leaving.hears_nothing_of(messages.PrefixTask), "two slots are free"
        staying.ready(config, "rollout")
        assert staying.hear(messages.PrefixTask).groups == second.groups
        leaving.say(fakes.sampled(first))
        leaving.hear(messages.Ack)
        assert leaving.hears_nothing_of(messages.PrefixTask)
        leaving.say(messages.Goodbye("asked to stop"))
        fakes.wait_until(lambda: broker.dispatcher.losses == {"rollout: left": 1}, "the leave")


def test_a_leaving_worker_that_joins_again_gets_no_work_either(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "leaving") as (leaving,):
        leaving.ready(config, "rollout")
        leaving.hear(messages.PrefixTask)
        leaving.say(messages.Leaving())
        leaving.ready(config, "rollout")
        assert leaving.hears_nothing_of(messages.PrefixTask)


def beats(peer: fakes.Peer, activity: messages.Activity, times: int = 5) -> None:
    """So many heartbeats, each of which is answered as one."""
    for _ in range(times):
        peer.say(
            messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="", activity=activity)
        )
        peer.hear(messages.Beat)
    assert not any(isinstance(message, messages.Unknown) for message in peer.passed_over)


def works_until_asked_to_join(peer: fakes.Peer) -> None:
    def is_asked() -> bool:
        peer.say(messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="waiting"))
        received = peer.client.receive(0.1)
        return received is not None and isinstance(received[0], messages.Unknown)

    fakes.wait_until(is_asked, "being asked")


@pytest.mark.parametrize("is_known", [False, True])
def test_a_worker_whose_ready_was_lost_sends_it_again_and_gets_work(
    is_known: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "READY_S", 0.3)
    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "r", "s") as (rollout, scorer),
    ):
        if is_known:
            scorer.ready(config, "scorer")
        scorer.join("scorer")
        beats(scorer, "loading")
        works_until_asked_to_join(scorer)
        scorer.ready(config, "scorer")
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(messages.PrefixTask)))
        scorer.hear(messages.ScoreTask)


def test_a_worker_is_not_asked_to_join_while_it_loads_nor_once_it_is_ready(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "READY_S", -1.0)
    with fakes.serving(config), fakes.peers(fakes.endpoint_of(config), "s") as (scorer,):
        scorer.join("scorer")
        beats(scorer, "loading")
        beats(scorer, "waiting")
        scorer.say(fakes.ready(config, "scorer"))
        beats(scorer, "working")


def swapping(config: RunConfig, rank: fakes.Peer, rollout: fakes.Peer) -> None:
    """A rollout that has finished its task is told to swap to version 1."""
    fakes.learner(rank)
    rollout.ready(config, "rollout")
    task = rollout.hear(messages.PrefixTask)
    rank.say(Published(V1))
    rank.hear(Accepted)
    while rollout.hear(messages.Beat).latest != V1:
        pass
    rollout.say(messages.Staged(1))
    rollout.say(messages.Heartbeat(progress=1, busy_row_s=0.0, leases=(task.task,), state=""))
    rollout.hear(messages.Beat)
    assert not any(isinstance(message, messages.Swap) for message in rollout.passed_over), (
        "a lease is open"
    )
    rollout.say(fakes.sampled(task))
    assert rollout.hear(messages.Swap) == messages.Swap(1)


def test_a_rollout_swaps_once_its_last_lease_is_in_and_works_at_the_new_version(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        assert rollout.hears_nothing_of(messages.PrefixTask)
        close = pack_logprobs([-1.0, -2.0 + 5e-4])
        rollout.say(messages.Installed(1, "d1", close, checksum=fakes.INSTALLED))
        assert rollout.hear(messages.PrefixTask).version == 1


@pytest.mark.parametrize(
    ("digest", "probe"),
    [
        ("d1", pack_logprobs([-1.0, -2.5])),
        ("d1", pack_logprobs([-1.0, float("nan")])),
        ("d0", fakes.NOTE.probe_logprobs),
    ],
    ids=["probe differs", "probe is not a number", "another digest"],
)
def test_three_failed_proofs_end_the_rollout_with_a_named_reason(
    digest: str, probe: bytes, config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        for failure in range(1, PROBE_FAILURES_ALLOWED):
            rollout.say(messages.Installed(1, digest, probe, checksum=fakes.INSTALLED))
            assert rollout.hear(messages.Probed).failures == failure
            rollout.say(messages.Staged(1))
            rollout.hear(messages.Swap)
        assert rollout.hears_nothing_of(messages.PrefixTask), (
            "no work for a rollout that proved nothing"
        )
        rollout.say(messages.Installed(1, digest, probe, checksum=fakes.INSTALLED))
        reason = rollout.hear(messages.Reject).reason
        assert "does not hold version 1 after 3 installations" in reason
        assert ("digest d0, not d1" if digest == "d0" else "rollout.probe_tolerance") in reason


def test_a_rollout_that_rejoins_before_its_weights_are_proved_must_prove_them_first(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        rollout.say(
            messages.Installed(1, "d1", pack_logprobs([-1.0, -2.5]), checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.Probed).outcome == "refused"
        rollout.join("rollout")
        unproved = msgspec.structs.replace(fakes.ready(config, "rollout"), version=UNPROVED)
        rollout.say(unproved)
        assert rollout.hears_nothing_of(messages.PrefixTask), (
            "no work for weights that nothing proved"
        )
        rollout.say(
            messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.PrefixTask).version == 1


def test_a_proof_that_is_sent_again_changes_nothing(config: RunConfig, broker: Broker) -> None:
    proof = messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        for _ in range(3):
            rollout.say(proof)
        task = rollout.hear(messages.PrefixTask)
        rank.say(
            Published(WeightsNote(2, "d2", fakes.NOTE.probe_tokens, fakes.NOTE.probe_logprobs))
        )
        rank.hear(Accepted)
        rollout.say(messages.Staged(2))
        rollout.say(fakes.sampled(task))
        assert rollout.hear(messages.Swap) == messages.Swap(2)
        rollout.say(proof)
        assert rollout.hears_nothing_of(messages.PrefixTask), (
            "it is about to install another version"
        )
        rollout.say(
            messages.Installed(2, "d2", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.PrefixTask).version == 2


def test_a_refusal_that_was_lost_is_sent_again_and_counted_once(
    config: RunConfig, broker: Broker
) -> None:
    bad = messages.Installed(1, "d1", pack_logprobs([-1.0, -2.5]), checksum=fakes.INSTALLED)
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        for _ in range(5):
            rollout.say(bad)
            assert rollout.hear(messages.Probed).failures == 1
        rollout.say(messages.Staged(1))
        rollout.hear(messages.Swap)
        rollout.say(
            messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.PrefixTask).version == 1


def test_a_version_that_is_published_only_after_it_was_installed_is_proved_by_the_next_proof(
    config: RunConfig, broker: Broker
) -> None:
    """A learner that was killed goes the same way again while its rollouts are ahead."""
    unproved = msgspec.structs.replace(fakes.ready(config, "rollout"), version=UNPROVED)
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        fakes.learner(rank)
        rollout.join("rollout")
        rollout.say(unproved)
        rollout.say(
            messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        assert rollout.hears_nothing_of(messages.PrefixTask)
        rank.say(Published(V1))
        rank.hear(Accepted)
        rollout.say(
            messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        assert rollout.hear(messages.PrefixTask).version == 1


def test_a_probe_of_the_wrong_length_ends_the_rollout(config: RunConfig, broker: Broker) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        rollout.say(messages.Installed(1, "d1", pack_logprobs([-1.0]), checksum=fakes.INSTALLED))
        assert "1 probe logprobs for 2" in rollout.hear(messages.Reject).reason


def test_a_version_whose_probe_is_no_number_is_refused_each_time_and_not_written_down(
    config: RunConfig, broker: Broker
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank") as (rank,):
        fakes.learner(rank)
        for _ in range(2):
            rank.say(
                Published(
                    msgspec.structs.replace(V1, probe_logprobs=pack_logprobs([-1.0, float("nan")]))
                )
            )
            assert "logprobs must be finite" in rank.hear(messages.Reject).reason
            rank.join("rank")
        content = journal.read(Path(config.directory) / journal.FOLDER)
        assert [record.note for record in content if isinstance(record, VersionPublished)] == [
            fakes.NOTE
        ]


def test_a_rollout_with_older_weights_of_a_version_gets_those_an_evaluation_needs(
    config: RunConfig, broker: Broker
) -> None:
    """The learner was killed, went back and came to version 1 again, with other weights."""
    anew, v2 = (
        msgspec.structs.replace(V1, version=version, digest=f"{version} anew") for version in (1, 2)
    )
    with fakes.peers(fakes.endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout)
        rollout.say(
            messages.Installed(1, "d1", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        task = rollout.hear(messages.PrefixTask)
        for note in (anew, v2):
            rank.say(Published(note))
            rank.hear(Accepted)
            if note == anew:
                rank.say(evaluate("v1", 1))
                rank.hear(Accepted)
        while not rollout.hears_nothing_of(messages.Beat):
            pass  # as they were announced
        rollout.say(messages.Heartbeat(progress=2, busy_row_s=0.0, leases=(task.task,), state=""))
        assert rollout.hear(messages.Beat).latest == anew
        rollout.say(messages.Staged(1))
        rollout.say(fakes.sampled(task, "d1"))
        rollout.hear(messages.Swap)
        rollout.say(
            messages.Installed(1, "1 anew", fakes.NOTE.probe_logprobs, checksum=fakes.INSTALLED)
        )
        test = rollout.hear(messages.PrefixTask)
        assert test.kind == "eval" and test.version == 1
        rollout.say(fakes.sampled(test, "1 anew"))
        rollout.say(messages.Heartbeat(progress=3, busy_row_s=0.0, leases=(), state=""))
        while rollout.hear(messages.Beat).latest != v2:
            pass


def test_an_evaluation_holds_a_rollout_at_its_version(config: RunConfig, broker: Broker) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        fakes.learner(rank)
        rollout.ready(config, "rollout")
        task = rollout.hear(messages.PrefixTask)
        rank.say(evaluate("v0", 0, [HELD_OUT] * 3))
        rank.hear(Accepted)
        rollout.say(messages.Staged(1))
        rollout.say(fakes.sampled(task))
        test = rollout.hear(messages.PrefixTask)
        assert test.kind == "eval" and not any(
            isinstance(e, messages.Swap) for e in rollout.passed_over
        )
        rollout.say(fakes.sampled(test))
        rollout.hear(messages.Swap)
        scorer.ready(config, "scorer")
        while (score := scorer.hear(messages.ScoreTask)).kind != "eval":
            scorer.say(fakes.scored(score))
        scorer.say(fakes.scored(score))
        scorer.hear(messages.Ack)
        rank.say(GetEvaluation("v0"))
        progress, payload = rank.hear_with_payload(EvaluationProgress)
        assert (progress.total, progress.judged, len(payload)) == (3, 3, 3)
        rank.say(GetEvaluation("unheard of"))
        assert rank.hear(EvaluationProgress).total == -1
