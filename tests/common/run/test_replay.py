"""The plan of a replay: what may be set, and which settings the learner of the run had from an iteration on."""

from operator import attrgetter
from pathlib import Path

import pytest

from prefixrl.common.config.load import changed, from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.changes import WEIGHTS_KEY, ChangeLine
from prefixrl.common.run.replay import ReplayPart, ReplayPlan, check_settings, parts_of, returns_of
from support.models.tiny_model import run_config

RATE, LENGTH = "learner.actor_lr", "algorithm.iterations"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path / "adapter")


def line(iteration: int, key: str, before: object, after: object, reason: str = "") -> ChangeLine:
    return ChangeLine(0.0, iteration, key, before, after, reason)


def values(parts: tuple[ReplayPart, ...], key: str) -> list[tuple[int, object]]:
    return [(part.first, attrgetter(key)(from_json(part.config))) for part in parts]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("algorithm.samples_per_prompt", 4, "a group has the samples that the run drew"),
        ("algorithm.groups_per_iteration", 8, "an iteration has the groups"),
        ("algorithm.max_staleness", 0, "it decides when samples are drawn"),
        ("data.epochs", 3, "the problems are those that the run asked"),
        ("rollout.temperature", 1.0, "no others are drawn"),
        ("adapter.model", "other", "no others are drawn"),
        ("mode", "direct", "no others are drawn"),
        ("scorer.max_new_tokens", 7, "the verdicts are those in the journal"),
        ("reward.no_leak", True, "the verdicts are those in the journal"),
        ("filter.accuracy", (0.1, 0.9), "the groups are those that the run trained"),
        ("evaluation.every", 3, "`prefixrl eval` judges its checkpoints"),
        ("broker.silence_s", 60.0, "no broker and no workers"),
    ],
)
def test_a_setting_that_would_have_given_other_samples_is_refused_by_name(
    config: RunConfig, key: str, value: object, reason: str
) -> None:
    section, _, name = key.rpartition(".")
    part = attrgetter(section)(config) if section else config
    changed_part = part.model_copy(update={name: value})
    after = config.model_copy(update={section: changed_part}) if section else changed_part
    with pytest.raises(ConfigError, match=rf"\n  {key}: .*{reason}"):
        check_settings(config, after)


def test_settings_of_the_learner_are_taken(config: RunConfig) -> None:
    settings = (
        "learner.actor_lr=1e-5",
        "learner.lora={rank=4}",
        "algorithm.name=rloo",
        "algorithm.ppo_epochs=3",
        "algorithm.iterations=4",
        "algorithm.kl=0.0",
        "implicit_reward.lr=1e-5",
        "checkpoint.every=1",
        "seed=7",
        "launch.learner_ranks=2",
    )
    check_settings(config, changed(config, settings, "--set"))
    check_settings(config, config)


def test_a_run_that_nobody_changed_is_one_part(config: RunConfig) -> None:
    (part,) = parts_of(config, [line(5, RATE, 1.0, 0.5, "an alarm")], (), 10)
    assert part == ReplayPart(first=0, config=config.model_dump_json())


def test_each_change_of_a_person_begins_a_part_with_the_settings_that_the_run_had_there(
    config: RunConfig,
) -> None:
    now = changed(config, (f"{LENGTH}=20", f"{RATE}=0.25"), "")
    lines = [
        line(4, LENGTH, 4, 8),
        line(4, RATE, 1.0, 0.5),
        line(6, "algorithm.entropy", 0.01, 0.04, "an alarm"),
        line(8, LENGTH, 8, 20),
        line(8, RATE, 0.5, 0.25),
        line(20, LENGTH, 20, 20),
    ]
    parts = parts_of(now, lines, (), 20)
    assert values(parts, LENGTH) == [(0, 4), (4, 8), (8, 20)]
    assert values(parts, RATE) == [(0, 1.0), (4, 0.5), (8, 0.25)]
    assert [part.changes for part in parts] == [(), tuple(lines[:2]), tuple(lines[3:5])]
    assert [part.first for part in parts_of(now, lines, (), 8)] == [0, 4], "the rest is not trained"


def test_epochs_that_became_longer_are_undone(config: RunConfig) -> None:
    epochs = changed(config, (f"{LENGTH}=null", "data.epochs=3"), "")
    parts = parts_of(epochs, [line(5, "data.epochs", 1, 3)], (), 9)
    assert values(parts, "data.epochs") == [(0, 1), (5, 3)]
    parts = parts_of(epochs, [line(5, "data.epochs", 1, 3)], ("data.epochs=null", f"{LENGTH}=9"), 9)
    assert values(parts, LENGTH) == [(0, 9)], "a setting holds in all parts"


def test_a_setting_of_the_replay_holds_from_the_beginning(config: RunConfig) -> None:
    lines = [line(4, RATE, 1.0, 0.5), line(6, "algorithm.kl", 0.05, 0.0)]
    now = changed(config, (f"{RATE}=0.5", "algorithm.kl=0.0"), "")
    parts = parts_of(now, lines, (f"{RATE}=0.1",), 10)
    assert values(parts, RATE) == [(0, 0.1), (6, 0.1)]
    assert parts[1].changes == (lines[1],)


def test_ways_back_are_those_of_an_answer_to_a_collapse() -> None:
    lines = [
        line(7, "scale of the learning rates", 1.0, 0.5, "an alarm"),
        line(7, WEIGHTS_KEY, 7, 4, "an alarm"),
        line(9, LENGTH, 9, 12),
    ]
    assert returns_of(lines) == {7: 4}


def test_a_part_ends_where_the_next_begins() -> None:
    parts = tuple(ReplayPart(first=first, config="") for first in (0, 4, 8))
    plan = ReplayPlan(
        source="run",
        run_id="",
        iterations=10,
        problems=0,
        parts=parts,
        returns={},
        functions=(),
        settings=("a=1",),
    )
    assert [plan.part_at(iteration).first for iteration in (0, 3, 4, 7, 8, 10)] == [
        *(0, 0, 4, 4, 8, 8)
    ]
    assert [plan.end_of(part) for part in parts] == [4, 8, 10]
    assert plan.command(Path("out")) == "`prefixrl replay run --set a=1 --out out`"
