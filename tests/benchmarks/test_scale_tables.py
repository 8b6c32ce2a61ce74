"""The tables of docs/scale.md: their inputs follow from committed figures, and a row is simulated again."""

import json

import pytest

from benchmarks.capacity.system import BrokerCosts
from benchmarks.scale_tables import (
    BEGIN,
    CHECKED,
    END,
    PAGE,
    TARGETS,
    broker_costs,
    checked,
    row_of,
    table,
)
from prefixrl.learner.broker.server import GATHER_S, MESSAGES
from support.paths import ROOT


def lines_after(begin: str) -> list[str]:
    return PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(END)[0].splitlines()


@pytest.mark.parametrize(
    ("workers", "offered_ms", "saturated_ms"), [("3", 1.070, 0.295), ("1000", 1.515, 0.386)]
)
def test_both_measured_loads_follow_from_the_costs(
    workers: str, offered_ms: float, saturated_ms: float
) -> None:
    costs = broker_costs(workers)
    assert 1000 * (costs.group_s + 2 * costs.turn_s / MESSAGES) == pytest.approx(
        saturated_ms, rel=0.01
    )
    rate = 195.0
    turns = 1 / (1 / (2 * rate) + GATHER_S + costs.turn_s)
    assert 1000 * (costs.group_s + turns * costs.turn_s / rate) == pytest.approx(
        offered_ms, rel=0.02
    )


def test_the_usual_costs_are_those_with_few_workers() -> None:
    few, usual = broker_costs("3"), BrokerCosts()
    assert (usual.group_s, usual.turn_s) == pytest.approx((few.group_s, few.turn_s), rel=0.01)


@pytest.mark.nightly
def test_a_row_of_the_page_is_simulated_again() -> None:
    lines = lines_after(BEGIN)
    head = table()
    assert lines[:2] == [next(head), next(head)]
    assert row_of(TARGETS[1], 8, 512) in lines


def test_the_page_has_the_measured_runs() -> None:
    assert lines_after(CHECKED) == list(checked())


def test_the_model_is_within_a_tenth_of_every_measured_rate() -> None:
    report = json.loads((ROOT / "benchmarks/results/scale_model.json").read_text(encoding="utf-8"))
    rates = {
        each["name"]: each["ratio"]
        for each in report["figures"]
        if each["name"].endswith("throughput")
    }
    assert len(rates) >= 5
    assert {name: ratio for name, ratio in rates.items() if not 0.9 <= ratio <= 1.1} == {}
