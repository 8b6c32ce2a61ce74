"""Peers that lie, flood or hoard: each is refused with a named cause, and the run goes on."""

import itertools
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.keys import Listed
from prefixrl.common.wire.messages import worker as messages
from prefixrl.common.wire.messages.fields import MOST_ROWS
from prefixrl.common.wire.messages.groups import GroupPrefixes, ScoredGroup
from prefixrl.common.wire.messages.learner import (
    FromBroker,
    GetBatch,
    GetEvaluation,
    GetStatus,
    Status,
    ToBroker,
)
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.common.wire.transport import Received, Server
from prefixrl.learner.broker.__main__ import build
from prefixrl.learner.broker.server import Broker
from prefixrl.learner.broker.workers import dispatch
from prefixrl.learner.broker.workers.identity import Start
from support import fakes
from support.keys import keys
from support.messages import evaluate

replace = msgspec.structs.replace
VOCABULARY = 100


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = fakes.run_on_disk(
        tmp_path, rollout={"groups_per_task": 2, "prefix_tokens": 4, "max_prompt_tokens": 8}
    )
    (Path(config.adapter.model) / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
    return config


@pytest.fixture
def child(config: RunConfig) -> "Iterator[subprocess.Popen[bytes]]":
    """A real broker process, killed afterwards whatever became of it."""
    started = fakes.broker_process(config)
    fakes.wait_until((Path(config.directory) / "endpoint").exists, "a socket")
    yield started
    fakes.end(started)


def refused(peer: fakes.Peer, reason: str) -> None:
    """The peer is told a reason, and the broker answers others."""
    assert reason in peer.hear(messages.Reject, timeout_s=5.0).reason


def works_on(config: RunConfig, broker: Broker) -> None:
    """An honest rollout and scorer get a group through."""
    with fakes.peers(fakes.endpoint_of(config), "honest-r", "honest-s") as (rollout, scorer):
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        fakes.score_one_item(rollout, scorer)
    broker.ledger.check()


def test_a_number_of_ranks_that_is_not_the_runs_is_refused_at_once(
    config: RunConfig, child: "subprocess.Popen[bytes]"
) -> None:
    with fakes.peers(fakes.endpoint_of(config), "rank", "other") as (rank, other):
        fakes.learner(other)
        for ranks in (2, 2**40):
            rank.join("rank")
            rank.say(GetBatch(0, 0, ranks))
            refused(rank, f"rank 0 of {ranks} asks for a batch, this run has 1")
        other.say(GetStatus())
        other.hear(Status, timeout_s=2.0)


BEAT = messages.Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="")
ABSURD: dict[str, ToBroker] = {
    "busy not a number": replace(BEAT, busy_row_s=math.nan),
    "busy for ever": replace(BEAT, busy_row_s=math.inf),
    "busy less than never": replace(BEAT, busy_row_s=-1.0),
    "progress backwards": replace(BEAT, progress=-1),
    "a state as long as a book": replace(BEAT, state="x" * 2**20),
    "a lease with a long name": replace(BEAT, leases=("x" * 2**20,)),
    "more leases than slots": replace(BEAT, leases=("x",) * 2**16),
    "a reason as long as a book": messages.Refused("e-1", "x" * 2**20),
}


@pytest.mark.parametrize("message", ABSURD.values(), ids=ABSURD)
def test_figures_and_strings_out_of_range_are_not_even_read(
    message: ToBroker, config: RunConfig
) -> None:
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "bad", "rank") as (bad, rank),
    ):
        bad.ready(config, "rollout")
        bad.hear(messages.PrefixTask)
        bad.say(message)
        fakes.learner(rank)
        actual = fakes.wait_until(
            lambda: (actual := fakes.status(rank))["malformed_messages"] and actual, "the count"
        )
        msgspec.json.decode(msgspec.json.encode(actual), type=StatusDocument)
        assert actual["workers"][0]["state"] == "starting"
        works_on(config, broker)


UNLIMITED_STRINGS = {
    *(
        "Prompt.prompt_id",
        "Prompt.draft",
        "Prompt.question",
        "Prompt.gold",
        "Prompt.system",
        "Prompt.source",
    ),
    *("Row.text", "TextVerdict.completion"),
}
"""Equal to what the broker gave out, or limited by the run's lengths in the handler."""
UNLIMITED_NUMBERS = {
    "GroupPrefixes.seed",
    "TextVerdict.reward",
    "Hello.protocol",
    "Ready.seats",
    "Ready.room",
}
"""Compared, or refused in the handler with a sentence."""


def test_every_string_and_number_that_a_worker_sends_has_a_limit() -> None:
    unlimited: set[str] = set()

    def walk(info: Any, where: str) -> None:
        match info:
            case msgspec.inspect.Metadata(type=inner):
                walk(inner, where)
            case msgspec.inspect.StructType(cls=cls, fields=fields):
                for field in fields:
                    owner = next(
                        each
                        for each in reversed(cls.__mro__)
                        if field.name in getattr(each, "__annotations__", ())
                    )
                    walk(field.type, f"{owner.__name__}.{field.name}")
            case msgspec.inspect.UnionType(types=types):
                for each in types:
                    walk(each, where)
            case msgspec.inspect.VarTupleType(item_type=item):
                walk(item, where)
            case msgspec.inspect.StrType(max_length=None):
                unlimited.add(where)
            case (
                msgspec.inspect.IntType(ge=least, le=most)
                | msgspec.inspect.FloatType(ge=least, le=most)
            ):
                if least is None or most is None:
                    unlimited.add(where)

    for kind in (
        messages.Heartbeat,
        messages.Prefixes,
        messages.Scores,
        messages.Refused,
        messages.Hello,
        messages.Ready,
    ):
        walk(msgspec.inspect.type_info(kind), kind.__name__)
    assert unlimited == UNLIMITED_STRINGS | UNLIMITED_NUMBERS


def test_an_evaluation_too_large_for_a_message_is_refused_with_its_size(config: RunConfig) -> None:
    huge = evaluate("huge", -1, prefix_tokens=pack_tokens([1] * 4096), samples=2**16)
    with fakes.serving(config) as broker, fakes.peers(fakes.endpoint_of(config), "rank") as (rank,):
        fakes.learner(rank)
        rank.say(huge)
        refused(rank, "65536 samples of 4096 tokens may have 2048 MiB, allowed are 48")
        works_on(config, broker)


def test_a_group_said_twice_is_refused_leased_or_not(config: RunConfig) -> None:
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "leased", "late") as both,
    ):
        for peer in both:
            peer.ready(config, "rollout")
            task = peer.hear(messages.PrefixTask)
            if peer is both[1]:
                peer.say(messages.Refused(task.task, "not now"))
            once = fakes.sampled(task)
            peer.say(replace(once, groups=once.groups * 2))
            peer.hear(messages.Reject, timeout_s=5.0)
        works_on(config, broker)


def test_a_fault_over_a_workers_message_ends_that_worker_with_a_trace_in_the_log(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("nobody foresaw this")

    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "first") as (first,),
    ):
        first.ready(config, "rollout", slots=2)
        task = first.hear(messages.PrefixTask)
        with monkeypatch.context() as broken:
            broken.setattr(broker.ledger, "take_prefixes", fail)
            first.say(fakes.sampled(task))
            refused(first, "the broker failed over this Prefixes (KeyError('nobody foresaw this'))")
        assert "Traceback" in caplog.text
        broker.ledger.check()
        assert set(broker.ledger.states()) <= {"queued", "sampling"}, (
            "what it held is given out again"
        )
        works_on(config, broker)


def from_worker(message: ToBroker) -> Received[ToBroker]:
    """A message as it comes from a socket."""
    return Received(b"r", message, b"", Listed("worker", "worker"))


def test_a_ledger_that_a_fault_left_half_changed_ends_the_process(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal holds whole events only; going on, the groups of the half one would wait for ever."""

    def fail(*_: object) -> None:
        raise KeyError("in the middle")

    server: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker, keys())
    broker = build(config, Path(config.directory), Start(0, "tcp://127.0.0.1:9"), lambda: server)
    try:
        hello = messages.Hello(protocol=PROTOCOL, role="rollout", incarnation="i", host="h", pid=1)
        for message in (hello, fakes.ready(config, "rollout")):
            broker._handle_safely(from_worker(message))
        broker.dispatcher.dispatch(0.0)
        ((_, task, _),) = broker.outbox.tasks
        assert isinstance(task, messages.PrefixTask)
        monkeypatch.setattr(broker.ledger, "_queue_scoring", fail)
        with pytest.raises(AssertionError):
            broker._handle_safely(from_worker(fakes.sampled(task)))
    finally:
        broker.journal.close()
        server.close()


def test_scores_of_a_worker_that_never_held_the_task_do_not_count(config: RunConfig) -> None:
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "r", "honest", "thief") as (rollout, honest, thief),
    ):
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(messages.PrefixTask)))
        honest.ready(config, "scorer")
        task = honest.hear(messages.ScoreTask)
        for name in (task.task, "another-1", ""):
            thief.ready(config, "scorer")
            thief.say(replace(fakes.scored(task, reward=0.0), task=name))
            refused(thief, "this worker was given no such task")
        honest.say(fakes.scored(task))
        honest.hear(messages.Ack)
        assert broker.ledger.counts.duplicates_ignored == 0
        broker.ledger.check()


def test_prefixes_of_a_worker_that_never_held_the_task_do_not_count(config: RunConfig) -> None:
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "honest", "thief") as (honest, thief),
    ):
        honest.ready(config, "rollout")
        task = honest.hear(messages.PrefixTask)
        thief.ready(config, "rollout")
        thief.say(fakes.sampled(task))
        refused(thief, "this worker was given no such task")
        honest.say(fakes.sampled(task))
        honest.hear(messages.Ack)
        assert broker.ledger.counts.duplicates_ignored == 0


def with_first(
    result: messages.Scores, change: Callable[[GroupPrefixes], GroupPrefixes]
) -> messages.Scores:
    first, *rest = result.groups
    return replace(result, groups=(replace(first, prefixes=change(first.prefixes)), *rest))


FORGED: dict[str, Callable[[GroupPrefixes], GroupPrefixes]] = {
    "another token": lambda group: replace(
        group, rows=(replace(group.rows[0], tokens=pack_tokens([0, 8])), *group.rows[1:])
    ),
    "another logprob": lambda group: replace(
        group, rows=(replace(group.rows[0], logprobs=pack_logprobs([-1.0, -2.0])), *group.rows[1:])
    ),
    "another gold answer": lambda group: replace(group, prompt=replace(group.prompt, gold="7")),
    "another rendering": lambda group: replace(group, prompt_tokens=pack_tokens([1] * 1000)),
    "another seed": lambda group: replace(group, seed=group.seed + 1),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_scorer_may_not_replace_what_it_was_given(
    change: Callable[[GroupPrefixes], GroupPrefixes], config: RunConfig
) -> None:
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "r", "bad") as (rollout, bad),
    ):
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(messages.PrefixTask)))
        bad.ready(config, "scorer")
        bad.say(with_first(fakes.scored(bad.hear(messages.ScoreTask)), change))
        refused(
            bad,
            "another prefixes, version or weights in groups [0]; it must answer exactly what it was given",
        )
        broker.ledger.check()
        assert "scored" not in broker.ledger.states()


def rows(group: GroupPrefixes, **fields: Any) -> GroupPrefixes:
    return replace(group, rows=tuple(replace(row, **fields) for row in group.rows))


POISON: dict[str, tuple[Callable[[GroupPrefixes], GroupPrefixes], str]] = {
    "an id of no token": (
        lambda group: rows(group, tokens=pack_tokens([0, VOCABULARY])),
        "row 0: token id 100 is not below the vocabulary of 100",
    ),
    "an id of no token in the prompt": (
        lambda group: replace(group, prompt_tokens=pack_tokens([2**31 - 1])),
        "prompt: token id 2147483647 is not below",
    ),
    "a long row": (
        lambda group: rows(group, tokens=pack_tokens([0] * 5), logprobs=pack_logprobs([-1.0] * 5)),
        "row 0: 5 tokens, allowed are 4",
    ),
    "a long prompt": (
        lambda group: replace(group, prompt_tokens=pack_tokens([1] * 9)),
        "prompt: 9 tokens, allowed are 8",
    ),
    "a long text": (
        lambda group: rows(group, text="x" * 4096),
        "a text of 4096 characters, allowed are 2048",
    ),
    "a row too many": (
        lambda group: replace(group, rows=group.rows * 2),
        "holds 4 rows, the task asked for 2",
    ),
    "another question": (
        lambda group: replace(group, prompt=replace(group.prompt, question="?")),
        "another prompt or seed in groups [0]",
    ),
    "another source": (
        lambda group: replace(group, prompt=replace(group.prompt, source="?")),
        "another prompt or seed in groups [0]",
    ),
    "another seed": (lambda group: replace(group, seed=0), "another prompt or seed in groups [0]"),
}


@pytest.mark.parametrize("case", POISON)
def test_prefixes_beyond_the_runs_limits_are_refused(case: str, config: RunConfig) -> None:
    change, reason = POISON[case]
    with fakes.serving(config) as broker, fakes.peers(fakes.endpoint_of(config), "bad") as (bad,):
        bad.ready(config, "rollout")
        result = fakes.sampled(bad.hear(messages.PrefixTask))
        bad.say(replace(result, groups=(change(result.groups[0]), *result.groups[1:])))
        refused(bad, reason)
        works_on(config, broker)


def test_a_text_that_nobody_keeps_is_refused(config: RunConfig) -> None:
    def wordy(group: ScoredGroup) -> ScoredGroup:
        return replace(
            group, verdicts=tuple(replace(each, completion="x") for each in group.verdicts)
        )

    with (
        fakes.serving(config),
        fakes.peers(fakes.endpoint_of(config), "r", "bad") as (rollout, bad),
    ):
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(messages.PrefixTask)))
        bad.ready(config, "scorer")
        task = bad.hear(messages.ScoreTask)
        bad.say(
            messages.Scores(
                task.task, "train", tuple(wordy(fakes.judged(group, task)) for group in task.groups)
            )
        )
        refused(bad, "row 0: a text of 1 characters, allowed are 0")


@pytest.mark.parametrize("slots", [0, -1, MOST_ROWS + 1, 2**31])
def test_an_absurd_room_for_rows_is_refused_with_the_allowed_ones(
    slots: int, config: RunConfig
) -> None:
    with fakes.serving(config), fakes.peers(fakes.endpoint_of(config), "greedy") as (greedy,):
        greedy.join("rollout")
        greedy.say(fakes.ready(config, "rollout", slots=slots))
        expected = f"a worker with 1 seats and room for {slots} rows cannot work here; its engine must offer from 1 to"
        refused(greedy, f"{expected} {MOST_ROWS} seats")


@pytest.mark.slow
def test_a_worker_that_only_counts_up_is_given_up_and_its_tasks_go_to_another(
    tmp_path: Path,
) -> None:
    config = fakes.run_on_disk(
        tmp_path,
        broker={"heartbeat_s": 0.1, "silence_s": 2.0, "stall_s": 3.0},
        learner={"batch_timeout_s": 4},
    )
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "hoarder") as (hoarder,),
    ):
        hoarder.ready(config, "rollout")
        task = hoarder.hear(messages.PrefixTask)
        counted = itertools.count(0, 1000)

        def reason() -> str:
            hoarder.say(
                messages.Heartbeat(
                    progress=next(counted),
                    busy_row_s=0.0,
                    leases=(task.task,),
                    state="working hard",
                )
            )
            received = hoarder.client.receive(0.05)
            return (
                received[0].reason if received and isinstance(received[0], messages.Reject) else ""
            )

        actual = fakes.wait_until(reason, "the end of patience")
        assert f"no result of the train task {task.task} within 3 s, whatever it reports" in actual
        works_on(config, broker)


@pytest.mark.slow
def test_after_a_restart_only_the_worker_that_held_a_task_may_deliver_it(
    config: RunConfig, child: "subprocess.Popen[bytes]"
) -> None:
    endpoint = fakes.endpoint_of(config)
    with fakes.peers(endpoint, "r", "s", "thief") as (rollout, scorer, thief):
        rollout.ready(config, "rollout")
        rollout.say(fakes.sampled(rollout.hear(messages.PrefixTask)))
        scorer.ready(config, "scorer")
        task = scorer.hear(messages.ScoreTask)
        fakes.end(child)
        with restarted(config):
            for peer, result in (
                (thief, fakes.scored(task)),
                (scorer, with_first(fakes.scored(task), FORGED["another token"])),
            ):
                peer.ready(config, "scorer")
                peer.say(result)
                refused(peer, "this worker was given no such task")
            scorer.ready(config, "scorer")
            scorer.say(fakes.scored(task))
            assert scorer.hear(messages.Ack) == messages.Ack(task.task)
            assert thief.hears_nothing_of(messages.Unknown)


@contextmanager
def restarted(config: RunConfig) -> Iterator[None]:
    """Another broker process of the same run at the same endpoint."""
    path = Path(config.directory) / "endpoint"
    before = path.stat().st_mtime_ns
    child = fakes.broker_process(config, is_restart=True)
    try:
        fakes.wait_until(lambda: path.stat().st_mtime_ns > before, "the socket of the next broker")
        yield
    finally:
        fakes.end(child)


def test_a_long_host_name_is_neither_enrolled_nor_answered(config: RunConfig) -> None:
    with fakes.serving(config) as broker, fakes.peers(fakes.endpoint_of(config), "long") as (long,):
        long.say(
            messages.Hello(
                protocol=PROTOCOL, role="scorer", incarnation="i", host="h" * 2**20, pid=1
            )
        )
        assert long.hears_nothing_of(messages.Welcome)
        assert not broker.dispatcher.registry.by_identity


def test_a_fault_over_a_request_ends_its_sender_alone(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nobody foresaw this either")

    with fakes.serving(config) as broker, fakes.peers(fakes.endpoint_of(config), "rank") as (rank,):
        rank.join("rank")
        monkeypatch.setattr(broker.dispatcher.evaluations, "progress", fail)
        rank.say(GetEvaluation("e"))
        refused(rank, "the broker failed over this GetEvaluation")
        works_on(config, broker)


def test_a_worker_that_never_lists_its_tasks_is_given_up(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LOST_TASK_S", 0.05)
    with (
        fakes.serving(config) as broker,
        fakes.peers(fakes.endpoint_of(config), "hider") as (hider,),
    ):
        hider.ready(config, "rollout")

        def beat() -> bool:
            hider.say(BEAT)
            return not hider.hears_nothing_of(messages.Reject, 0.1)

        fakes.wait_until(beat, "the end of patience")
        works_on(config, broker)
