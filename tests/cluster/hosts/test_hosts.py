"""A run on several hosts: what is trained, what a cut link and a dead host cost, and what can be read on the way."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.hosts.capture import Pieces, Recorder, streams, weight_pieces
from cluster.hosts.network import TUNNEL_PORT, Network, network, why_it_cannot_run
from cluster.hosts.on_hosts import ITERATIONS, SETTINGS, Run, data, freeze_with_a_task, plain_text
from support.runs.run_helper import (
    check_books,
    finish,
    inspect,
    launched,
    losses,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]

Note = Callable[[str, object], None]
CUT_S = 30.0
BACK_S = 10.0
"""Longest time until a worker is back at work after its link is."""
TOLERANCE = 1e-5
SEND_PLAIN = """
import sys, zmq
from pathlib import Path
with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
    sender.bind(f"tcp://{sys.argv[1]}:5555")
    for path in sys.argv[2:]:
        sender.send(Path(path).read_bytes())
"""
TAKE_PLAIN = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.PULL) as taker:
    taker.connect(f"tcp://{sys.argv[1]}:5555")
    for _ in range(int(sys.argv[2])):
        taker.recv()
"""


@dataclass
class Outcome:
    """The traces of a run and its faults."""

    run: Run
    summary: dict[str, Any]
    back_s: dict[str, float]
    """Seconds from the mending of the link until a worker of the host was known again."""
    recording: Path
    at_the_cut: int
    """Iterations that were trained before the link was cut."""
    after: dict[str, Any]
    """The broker's status some iterations after the link was mended."""


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Network]:
    if reason := why_it_cannot_run():
        pytest.fail(f"the tests on several hosts cannot run here: {reason}")
    with network(3) as made:
        yield made


@pytest.fixture(scope="module")
def outcome(three_hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run, through all its faults, to its end."""
    folder = tmp_path_factory.mktemp("hosts")
    run = Run(folder, (*SETTINGS, *data(folder)))
    recorder = Recorder(three_hosts.switch, folder / "all.pcap")
    try:
        return go_through_faults(run, three_hosts, recorder)
    except AssertionError as error:
        said = "\n".join(
            f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log"))
        )
        raise AssertionError(f"{error}\n{said}") from None


def go_through_faults(run: Run, hosts: Network, recorder: Recorder) -> Outcome:
    first, second, third = hosts.hosts[:3]
    tunnel = hosts.tunnel(first, second, log=run.log("tunnel"))
    ranks = [
        run.start_rank(rank, host, f"tcp://{first.address}:0", tunnel[0])
        for rank, host in enumerate((first, second))
    ]
    wait_for((run.directory / "endpoint").exists, "the broker", 120.0)
    keeping = run.keep_weights()
    for name in ("h2", "h3"):
        run.add_key(name, run.folder / name)
    run.start_worker("rollout", "h3", third)
    scorer = run.start_worker("scorer", "h3", third)
    wait_for(lambda: trained_iterations(run.directory) >= 2, "the second iteration", 300.0)

    freeze_with_a_task(run, scorer, first, "scorer-0")
    third.cut()
    cut_s, at_the_cut = time.monotonic(), trained_iterations(run.directory)
    scorer.send_signal(signal.SIGCONT)  # what it holds is finished behind the cut
    for name in ("rollout-0", "scorer-0"):
        wait_for(lambda name=name: f"gave up {name} " in run.said(), f"the loss of {name}", CUT_S)  # type: ignore[misc]
    run.start_worker("scorer", "h2", second)
    wait_for(lambda: time.monotonic() - cut_s >= CUT_S, "the end of the cut", CUT_S)
    third.mend()
    mended_s, back_s = time.monotonic(), dict[str, float]()
    for name in ("rollout-0", "scorer-0"):
        again = f"{name} joined from"
        wait_for(lambda again=again: run.said().count(again) == 2, f"{name} again", 60.0)  # type: ignore[misc]
        back_s[name] = time.monotonic() - mended_s
    wait_for(
        lambda: trained_iterations(run.directory) >= at_the_cut + 3, "three more iterations", 120.0
    )
    after = run.status_from(first)

    third.die()
    run.operate("keygen", str(run.directory), "--remove", "h3")
    fourth = hosts.add()
    run.add_key("h4", run.folder / "h4")
    run.start_worker("rollout", "h4", fourth)
    run.start_worker("scorer", "h4", fourth)
    for rank in ranks:
        assert rank.wait(400.0) == 0
    for worker in (*second.processes[2:], *fourth.processes):
        assert worker.wait(60.0) == 0
    keeping.join(10.0)
    summary = json.loads((run.directory / "summary.json").read_text())
    return Outcome(run, summary, back_s, recorder.stop(), at_the_cut, after)


@pytest.mark.proof
def test_every_group_is_trained_once_whatever_happened_to_its_workers(outcome: Outcome) -> None:
    check_books(outcome.summary, outcome.run.directory)
    assert (
        outcome.summary["groups"]["trained"]
        == outcome.summary["groups"]["issued"]
        == ITERATIONS * 16
    )
    assert trained_iterations(outcome.run.directory) == ITERATIONS > outcome.at_the_cut + 3
    assert outcome.summary["evaluations_incomplete"] == []


def test_a_host_that_was_cut_off_is_back_within_seconds_and_its_late_result_harms_nobody(
    outcome: Outcome, record_property: Note
) -> None:
    record_property("back_s", outcome.back_s)
    assert max(outcome.back_s.values()) <= BACK_S, outcome.back_s
    said = outcome.run.said()
    assert (
        "gave up scorer-0" in said
        and "it held nothing" not in said.partition("gave up scorer-0")[2].split("\n")[0]
    )
    assert "refused scorer" not in said and "refused rollout" not in said
    workers = {each["name"]: each for each in outcome.after["workers"]}
    assert {"rollout-0", "scorer-0", "scorer-1"} <= workers.keys(), (
        "each under the name that it had"
    )
    assert workers["scorer-0"]["tasks_done"] > 1 and workers["rollout-0"]["tasks_done"] > 1


@pytest.mark.proof
def test_a_new_host_takes_the_place_of_a_dead_one(outcome: Outcome) -> None:
    said = outcome.run.said()
    for name in ("rollout-0", "scorer-0"):
        assert said.count(f"gave up {name} ") == 2
    for name in ("rollout-1", "scorer-2"):
        assert f"{name} is ready" in said
    assert "leaving: the run is finished" in outcome.run.said("rollout-h4")


def test_two_ranks_on_two_hosts_train_what_one_rank_on_one_host_trains(
    outcome: Outcome, tmp_path: Path, record_property: Note
) -> None:
    directory = tmp_path / "alone"
    with launched(directory, *outcome.run.settings) as process:
        finish(process, directory, timeout_s=400.0)
    apart, alone = losses(outcome.run.directory), losses(directory)
    assert len(apart) == len(alone) == ITERATIONS
    worst = max(
        abs(theirs[name] - mine[name])
        for theirs, mine in zip(apart, alone, strict=True)
        for name in mine
    )
    record_property("largest_difference", worst)
    assert worst <= TOLERANCE
    assert [each["prompt_id"] for each in inspect(outcome.run.directory)] == [
        each["prompt_id"] for each in inspect(directory)
    ]


def test_ranks_meet_over_the_interface_that_leads_to_the_first_one(outcome: Outcome) -> None:
    for rank in range(2):
        assert (
            f"rank {rank} of 2 meets the others at 10.98.0.1; gloo on wg0 encrypts nothing"
            in outcome.run.said(f"rank-{rank}")
        )


def pieces(outcome: Outcome) -> Pieces:
    weights = sorted(outcome.run.kept.glob("*.bin"))
    versions = {int(each.name[1:9]) for each in weights if each.name.startswith("v")}
    assert versions == set(range(ITERATIONS + 1)), versions
    results = {"weights": {piece for path in weights for piece in weight_pieces(path)}}
    return Pieces({**plain_text(outcome.run), **results})


def search(path: Path, looked_for: Pieces) -> tuple[Counter[str], Counter[str]]:
    """Places with plain text by kind, and bytes by sender and receiver."""
    result: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for (sender, at, receiver, to), content in streams(path).items():
        is_tunnel = TUNNEL_PORT in (at, to)
        sizes[f"{sender} -> {receiver}{' in the tunnel' if is_tunnel else ''}"] += len(content)
        result += looked_for.count(content)
    return result, sizes


def test_nothing_can_be_read_on_the_way(outcome: Outcome, record_property: Note) -> None:
    actual, sizes = search(outcome.recording, pieces(outcome))
    record_property("recorded_bytes", dict(sizes))
    assert not actual
    snapshot = (outcome.run.kept / "v00000001-weights.bin").stat().st_size
    assert sizes["10.99.0.1 -> 10.99.0.3"] > snapshot, "the weights went another way"
    assert sizes["10.99.0.1 -> 10.99.0.2 in the tunnel"] > snapshot, "the ranks met another way"


def test_the_same_search_finds_what_is_sent_without_encryption(
    outcome: Outcome, three_hosts: Network, tmp_path: Path, record_property: Note
) -> None:
    looked_for = pieces(outcome)
    compact = tmp_path / "config.json"
    compact.write_text(
        json.dumps(
            json.loads((outcome.run.directory / "config.json").read_text()), separators=(",", ":")
        )
    )
    weights = outcome.run.kept / "v00000001-weights.bin"
    sent = [
        outcome.run.directory / "journal" / "000000.msgpack",
        compact,
        outcome.run.folder / "train.jsonl",
        weights,
    ]
    recorder = Recorder(three_hosts.switch, tmp_path / "plain.pcap")
    first, second = three_hosts.hosts[:2]
    sender = first.start(
        [sys.executable, "-c", SEND_PLAIN, first.address, *map(str, sent)], tmp_path / "send.log"
    )
    second.run(sys.executable, "-c", TAKE_PLAIN, first.address, str(len(sent)))
    assert sender.wait(30.0) == 0
    actual, _ = search(recorder.stop(), looked_for)
    record_property("found_without_encryption", dict(actual))
    assert set(actual) == {"question", "gold answer", "tokens", "config", "weights"}
    assert actual["weights"] > 1000
