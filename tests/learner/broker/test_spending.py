"""The cost of the target's endpoint: nothing is counted twice or lost, whoever dies."""

import json
from pathlib import Path

from prefixrl.common.config.openai_options import OpenAIConfig
from prefixrl.common.run.status import USAGE_FILE, UsageTotal
from prefixrl.common.wire.messages import Beat, Heartbeat, Usage
from prefixrl.learner.broker.spending import UsageFile
from support.fakes import endpoint_of, peers, run_on_disk, serving, status

FREE = OpenAIConfig()
PRICED = OpenAIConfig(prompt_price=2.0, completion_price=10.0)


def test_the_newest_count_of_each_scorer_counts_once(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, FREE)
    assert spending.total() is None
    spending.note("a", None)
    assert spending.total() is None
    spending.note("a", Usage(requests=1, prompt_tokens=10, completion_tokens=5, retries=0, limited_s=0.5))
    spending.note("b", Usage(requests=2, prompt_tokens=20, completion_tokens=7, retries=3, limited_s=0.0))
    spending.note("a", Usage(requests=4, prompt_tokens=40, completion_tokens=9, retries=1, limited_s=1.5))
    spending.note("b", None)
    assert spending.total() == UsageTotal(
        requests=6, prompt_tokens=60, completion_tokens=16, retries=4, limited_s=1.5, cost=None
    )


def test_a_restarted_broker_continues_from_the_saved_usage(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, FREE)
    spending.note("gone", Usage(requests=1, prompt_tokens=10, completion_tokens=5))
    spending.note("alive", Usage(requests=2, prompt_tokens=20, completion_tokens=7))
    spending.save(0.0, at_once=True)
    spending.note("alive", Usage(requests=3, prompt_tokens=30, completion_tokens=8))
    spending.save(0.1)  # too soon: these two counts are in nobody's file when the broker is killed
    again = UsageFile(tmp_path, FREE)
    assert again.total() == UsageTotal(
        requests=3, prompt_tokens=30, completion_tokens=12, retries=0, limited_s=0.0, cost=None
    )
    again.note("alive", Usage(requests=4, prompt_tokens=40, completion_tokens=9))
    assert again.total() == UsageTotal(
        requests=5, prompt_tokens=50, completion_tokens=14, retries=0, limited_s=0.0, cost=None
    )


def test_prices_are_per_million_tokens(tmp_path: Path) -> None:
    spending = UsageFile(tmp_path, PRICED)
    spending.note("a", Usage(requests=1, prompt_tokens=3_000_000, completion_tokens=500_000))
    total = spending.total()
    assert total is not None and total.cost == 3 * 2.0 + 0.5 * 10.0
    assert "cost 11.00" in str(total) and "3,000,000 prompt" in str(total)


def test_the_usage_in_a_heartbeat_is_in_the_status_and_in_the_run_directory(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    with serving(config), peers(endpoint_of(config), "one", "two") as (scorer, operator):
        operator.join("operator")
        assert status(operator)["endpoint"] is None
        scorer.ready(config, "scorer")
        scorer.say(
            Heartbeat(
                progress=1,
                busy_slot_s=0.0,
                leases=(),
                state="scoring",
                usage=Usage(requests=3, prompt_tokens=30, completion_tokens=8),
            )
        )
        scorer.hear(Beat)
        told = status(operator)["endpoint"]
        assert (told["requests"], told["prompt_tokens"], told["completion_tokens"]) == (3, 30, 8)
    written = json.loads((Path(config.directory) / USAGE_FILE).read_text())
    assert written["one"]["prompt_tokens"] == 30
