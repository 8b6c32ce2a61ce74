"""The cost of the target's endpoint: nothing is counted twice or lost, whoever dies."""

import json
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.served import OpenAIConfig
from prefixrl.common.run.status import USAGE_FILE, UsageTotal
from prefixrl.common.wire.messages.learner import (
    Accepted,
    EvaluationProgress,
    GetBatch,
    GetEvaluation,
    RunOver,
)
from prefixrl.common.wire.messages.worker import Beat, Heartbeat, RequestDemand, Usage
from prefixrl.learner.broker.status import GONE_S, MOST_SCORERS, UsageFile
from support.fakes import endpoint_of, peers, run_on_disk, serving, status
from support.messages import HEARTBEAT_WITH_USAGE, empty, evaluate
from support.runs.small_disk import small_disk

FREE = OpenAIConfig()
PRICED = OpenAIConfig(prompt_price=2.0, completion_price=10.0)


def test_the_newest_count_of_each_scorer_counts_once(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, FREE)
    assert spending.total() is None
    spending.note_usage("a", None, 0.0)
    assert spending.total() is None
    spending.note_usage(
        "a", Usage(requests=1, prompt_tokens=10, completion_tokens=5, retries=0, limited_s=0.5), 0.0
    )
    spending.note_usage(
        "b", Usage(requests=2, prompt_tokens=20, completion_tokens=7, retries=3, limited_s=0.0), 0.0
    )
    spending.note_usage(
        "a", Usage(requests=4, prompt_tokens=40, completion_tokens=9, retries=1, limited_s=1.5), 0.0
    )
    spending.note_usage("b", None, 0.0)
    assert spending.total() == UsageTotal(
        requests=6, prompt_tokens=60, completion_tokens=16, retries=4, limited_s=1.5, cost=None
    )


def test_a_restarted_broker_continues_from_the_saved_usage(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, FREE)
    spending.note_usage("gone", Usage(requests=1, prompt_tokens=10, completion_tokens=5), 0.0)
    spending.note_usage("alive", Usage(requests=2, prompt_tokens=20, completion_tokens=7), 0.0)
    spending.save(0.0, at_once=True)
    spending.note_usage("alive", Usage(requests=3, prompt_tokens=30, completion_tokens=8), 0.0)
    spending.save(0.1)  # too soon: these two counts are in nobody's file when the broker is killed
    again = UsageFile(tmp_path, FREE)
    assert again.total() == UsageTotal(
        requests=3, prompt_tokens=30, completion_tokens=12, retries=0, limited_s=0.0, cost=None
    )
    again.note_usage("alive", Usage(requests=4, prompt_tokens=40, completion_tokens=9), 0.0)
    assert again.total() == UsageTotal(
        requests=5, prompt_tokens=50, completion_tokens=14, retries=0, limited_s=0.0, cost=None
    )


def test_counts_that_find_no_room_are_written_once_there_is_some(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        spending = UsageFile(disk.path, FREE)
        spending.note_usage("a", Usage(requests=1, prompt_tokens=10, completion_tokens=5), 0.0)
        disk.fill()
        spending.save(0.0, at_once=True)
        assert [each.name for each in disk.path.iterdir()] == ["ballast"]
        disk.make_room()
        spending.save(10.0)
        assert UsageFile(disk.path, FREE).total() == spending.total()


def test_scorers_that_come_and_go_for_ever_take_no_more_room_and_their_sum_stays_true(
    tmp_path: Path,
) -> None:
    spending, many = UsageFile(tmp_path, FREE), 3 * MOST_SCORERS
    for number in range(many):
        now_s = number * GONE_S / 10
        for beats in (1, 2):
            spending.note_usage(
                f"scorer-{number}",
                Usage(requests=beats, prompt_tokens=number, completion_tokens=7),
                now_s,
            )
            spending.note_usage(
                "the one that stays",
                Usage(requests=5 * number, prompt_tokens=1, limited_s=0.5),
                now_s,
            )
        if number == many // 2:
            spending.save(now_s, at_once=True)
            spending = UsageFile(tmp_path, FREE)  # as a restarted broker
    spending.save(0.0, at_once=True)
    kept = json.loads((tmp_path / USAGE_FILE).read_text())
    assert len(kept) <= MOST_SCORERS + 1 and "the one that stays" in kept
    total = spending.total()
    assert total is not None
    assert (total.requests, total.prompt_tokens) == (
        2 * many + 5 * (many - 1),
        sum(range(many)) + 1,
    )
    assert total.completion_tokens == 7 * many


def test_scorers_that_may_still_live_keep_their_own_counts(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, FREE)
    for now_s in (0.0, GONE_S - 1.0):
        for number in range(2 * MOST_SCORERS):
            spending.note_usage(str(number), Usage(requests=1 + int(now_s)), now_s)
    total = spending.total()
    assert total is not None and total.requests == 2 * MOST_SCORERS * int(GONE_S)


def test_prices_are_per_million_tokens(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, PRICED)
    spending.note_usage(
        "a", Usage(requests=1, prompt_tokens=3_000_000, completion_tokens=500_000), 0.0
    )
    total = spending.total()
    assert total is not None and total.cost == 3 * 2.0 + 0.5 * 10.0
    assert "cost 11.00" in str(total) and "3,000,000 prompt" in str(total)


def test_the_usage_in_a_heartbeat_is_in_the_status_and_in_the_run_directory(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    with serving(config), peers(endpoint_of(config), "one", "two") as (scorer, operator):
        operator.join("operator")
        assert status(operator)["endpoint"] is None
        scorer.ready(config, "scorer")
        scorer.say(HEARTBEAT_WITH_USAGE)
        scorer.hear(Beat)
        told = status(operator)["endpoint"]
        assert (told["requests"], told["prompt_tokens"], told["completion_tokens"]) == (3, 30, 8)
    written = json.loads((Path(config.directory) / USAGE_FILE).read_text())
    assert written["one"]["prompt_tokens"] == 30


def run_with_ceiling(folder: Path, most_cost: float) -> RunConfig:
    """A run of 5 iterations of 8 completions; a million completion tokens cost 1."""
    endpoint = {"url": "http://127.0.0.1:9/v1", "completion_price": 1.0, "most_cost": most_cost}
    section = {"engine": "openai", "openai": endpoint}
    return run_on_disk(
        folder, scorer=section, rollout={"engine": "simulated", "groups_per_task": 2}
    )


def beat(requests: int, millions: float) -> Heartbeat:
    usage = Usage(requests=requests, completion_tokens=int(millions * 1e6))
    return empty(Heartbeat, usage=usage, demand=RequestDemand())


def test_a_run_whose_cost_reached_its_ceiling_is_over_and_says_why_also_after_a_restart(
    tmp_path: Path,
) -> None:
    config = run_with_ceiling(tmp_path, 5.0)
    for times in (1, 2):
        with serving(config), peers(endpoint_of(config), "one", "rank", "two") as opened:
            scorer, rank, operator = opened
            operator.join("operator")
            rank.join("rank")
            if times == 1:
                scorer.join("scorer")
                scorer.say(beat(20, 4.9))
                scorer.hear(Beat)
            rank.say(GetBatch(0, 0, 1))
            over = rank.hear(RunOver)
            assert over.iterations == 0
            assert "scorer.openai.most_cost = 5 is reached: 4.9 is spent" in over.reason
            assert status(operator)["ending"] == over.reason


def test_an_evaluation_that_would_exceed_the_ceiling_is_refused_with_its_cause(
    tmp_path: Path,
) -> None:
    config = run_with_ceiling(tmp_path, 5.0)
    with serving(config), peers(endpoint_of(config), "one", "rank") as (scorer, rank):
        scorer.join("scorer")
        scorer.say(beat(20, 4.0))  # 0.2 each
        scorer.hear(Beat)
        rank.join("rank")
        for name, samples, failed in (("small", 4, 0), ("large", 9, 1)):
            rank.say(evaluate(name, samples=samples))
            rank.hear(Accepted)
            rank.say(GetEvaluation(name))
            progress = rank.hear(EvaluationProgress)
            assert (progress.total, progress.failed) == (1, failed)
        ((_, cause),) = progress.causes
        assert "more than scorer.openai.most_cost = 5; 4 is spent" in cause


def test_a_heartbeat_of_a_scorer_is_answered_with_its_permits_and_a_rest_reaches_all(
    tmp_path: Path,
) -> None:
    section = {"engine": "openai", "openai": {"url": "http://127.0.0.1:9/v1"}}
    section["openai"]["requests_per_minute"] = 600
    config = run_on_disk(tmp_path, scorer=section)
    with serving(config), peers(endpoint_of(config), "one", "two", "three") as opened:
        first, second, rollout = opened
        rollout.join("rollout")
        for peer in (first, second):
            peer.join("scorer")
            peer.say(empty(Heartbeat, demand=RequestDemand(lacking=1)))
            grant = peer.hear(Beat).grant
            assert grant is not None and grant.rest_s == 0.0
        first.say(empty(Heartbeat, demand=RequestDemand(rest_s=30.0)))
        for peer in (first, second):  # the second without having said anything
            grant = peer.hear(Beat).grant
            assert grant is not None and 29.0 < grant.rest_s <= 30.0
        rollout.say(empty(Heartbeat))
        assert rollout.hear(Beat).grant is None
