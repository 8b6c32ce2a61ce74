"""What the target's endpoint cost: nothing twice, nothing lost, whoever dies."""

import json
from pathlib import Path

from fakes import endpoint_of, peers, run_on_disk, serving, status
from prefixrl.common.messages import Beat, Heartbeat, Usage
from prefixrl.common.openai_options import OpenAIConfig
from prefixrl.common.status import USAGE_FILE, Spent
from prefixrl.learner.broker.spending import Spending

FREE = OpenAIConfig()
PRICED = OpenAIConfig(prompt_price=2.0, completion_price=10.0)


def test_the_newest_count_of_each_scorer_counts_once(tmp_path: Path) -> None:
    spending = Spending(tmp_path, FREE)
    assert spending.total() is None
    spending.note("a", None)
    assert spending.total() is None
    spending.note("a", Usage(1, 10, 5, 0, 0.5))
    spending.note("b", Usage(2, 20, 7, 3, 0.0))
    spending.note("a", Usage(4, 40, 9, 1, 1.5))
    spending.note("b", None)
    assert spending.total() == Spent(6, 60, 16, 4, 1.5, None)


def test_a_broker_that_comes_back_goes_on_from_what_was_written_down(tmp_path: Path) -> None:
    spending = Spending(tmp_path, FREE)
    spending.note("gone", Usage(1, 10, 5))
    spending.note("alive", Usage(2, 20, 7))
    spending.save(0.0, at_once=True)
    spending.note("alive", Usage(3, 30, 8))
    spending.save(0.1)  # too soon: these two counts are in nobody's file when the broker is killed
    again = Spending(tmp_path, FREE)
    assert again.total() == Spent(3, 30, 12, 0, 0.0, None)
    again.note("alive", Usage(4, 40, 9))
    assert again.total() == Spent(5, 50, 14, 0, 0.0, None)


def test_prices_are_per_million_tokens(tmp_path: Path) -> None:
    spending = Spending(tmp_path, PRICED)
    spending.note("a", Usage(1, 3_000_000, 500_000))
    total = spending.total()
    assert total is not None and total.cost == 3 * 2.0 + 0.5 * 10.0
    assert "cost 11.00" in str(total) and "3,000,000 prompt" in str(total)


def test_what_a_scorer_says_in_its_heartbeat_is_in_the_status_and_in_the_run_directory(
    tmp_path: Path,
) -> None:
    config = run_on_disk(tmp_path)
    with serving(config), peers(endpoint_of(config), "one", "two") as (scorer, operator):
        operator.join("operator")
        assert status(operator)["endpoint"] is None
        scorer.ready(config, "scorer")
        scorer.say(Heartbeat(1, 0.0, (), "scoring", Usage(3, 30, 8)))
        scorer.hear(Beat)
        told = status(operator)["endpoint"]
        assert (told["requests"], told["prompt_tokens"], told["completion_tokens"]) == (3, 30, 8)
    written = json.loads((Path(config.directory) / USAGE_FILE).read_text())
    assert written["one"]["prompt_tokens"] == 30
