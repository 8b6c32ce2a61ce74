"""Records of objectives: the pages that show them, and records that packages add."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.config.load import from_json, load
from prefixrl.common.config.objectives import OBJECTIVES, ObjectiveRecord
from prefixrl.common.errors import ConfigError
from prefixrl.learner.training import objectives
from prefixrl.learner.training.objectives import resolve, row_rewards
from support.models.tiny_model import DEEPSPEED_WARNINGS, random_iteration, run_config
from support.models.training import trained
from support.packages import installed
from support.paths import ROOT

pytestmark = DEEPSPEED_WARNINGS

MAXRL = """
from prefixrl.common.config.objectives import ObjectiveRecord


def advantages(rewards, groups):
    members = {g: [r for r, h in zip(rewards, groups) if h == g] for g in set(groups)}
    means = {g: sum(found) / len(found) for g, found in members.items()}
    return [r / means[g] - 1 if means[g] else 0.0 for r, g in zip(rewards, groups)]


MAXRL = ObjectiveRecord(advantage="(r - mean) / mean", function=advantages)
"""
ENTRY = "[prefixrl.objectives]\nmaxrl = stranger:MAXRL\n"
RUN_FILE = ROOT / "deploy/examples/arithmetic/run.toml"


@pytest.fixture
def maxrl(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, "stranger", ENTRY, MAXRL):
        yield


def read(*keys: str) -> None:
    load(RUN_FILE, keys)


WHITENED = {True: "yes", False: "no"}
DIVISORS = {
    "tokens": "tokens",
    "rows": "prefixes",
    "longest_row": "prefixes × most tokens of a prefix",
}


def columns(name: str, record: ObjectiveRecord) -> list[str]:
    """Whitened, ratio, divisor and critic of an objective, in words."""
    critic = WHITENED[record.has_critic] + (", one value" if record.is_one_action else "")
    ratio = "per prefix" if record.is_one_action else "per token"
    return [WHITENED[record.is_whitened], ratio, DIVISORS[record.divisor], critic]


def test_the_table_above_the_formulas_is_that_of_the_records() -> None:
    table = (objectives.__doc__ or "").partition("critic\n")[2].partition("\n\n")[0]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    expected = [[name, *columns(name, record)] for name, record in OBJECTIVES.items()]
    assert rows == expected, f"the table at the top of {objectives.__file__}"


def test_the_page_of_objectives_shows_the_records() -> None:
    page = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
    table = page.partition("## Names")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    longest = "prefixes × `rollout.prefix_tokens` (direct mode: `answer_tokens`)"
    expected = [
        [
            f"`{name}`{' (default)' if name == 'gae' else ''}",
            record.advantage,
            *(
                longest if word == DIVISORS["longest_row"] else word
                for word in columns(name, record)
            ),
        ]
        for name, record in OBJECTIVES.items()
    ]
    assert [[cell.strip() for cell in row] for row in rows] == expected, "docs/objectives.md"


def test_records_are_read_without_torch() -> None:
    program = "import sys, prefixrl.common.config.objectives; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.usefixtures("maxrl")
def test_a_package_adds_an_objective_by_a_record_and_a_formula(adapter: Path) -> None:
    config = run_config(adapter, algorithm={"name": "maxrl"})
    assert from_json(config.model_dump_json()) == config
    assert not config.algorithm.has_critic and not config.algorithm.is_whitened
    objective = resolve(config.algorithm, 8)
    actual = row_rewards(objective, [1.0, 0.0, 0.5, 0.0, 0.0], [0, 0, 0, 1, 1])
    assert actual == [1.0, -1.0, 0.0, 0.0, 0.0]
    (metrics,), _ = trained(config, random_iteration(0))
    assert "value" not in metrics.means and any(metrics.row_advantages)


@pytest.mark.usefixtures("maxrl")
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("gamma=0.9", "nothing is discounted"),
        ("gae_lambda=0.9", "no value per token"),
        ("value_clip=0.1", "have no critic"),
        ("zscore=buffer", "do not divide by a deviation"),
        ("whiten=true", "whiten always or never"),
        ("advantage_function=mine.py:f", "or a function of their own"),
    ],
)
def test_keys_that_a_foreign_objective_has_no_use_for_are_refused_with_true_reasons(
    setting: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f'no effect with name = "maxrl": .*{reason}'):
        read("algorithm.name=maxrl", f"algorithm.{setting}")


@pytest.mark.usefixtures("maxrl")
def test_a_foreign_objective_takes_the_keys_of_every_objective_and_no_rewards_of_tokens() -> None:
    read("algorithm.name=maxrl", "algorithm.aggregation=sequence", "algorithm.clip=0.1")
    read("algorithm.name=maxrl", "algorithm.samples_per_prompt=1")
    with pytest.raises(ConfigError, match=r"implicit_reward with algorithm\.name = 'maxrl'"):
        read("algorithm.name=maxrl", "implicit_reward.beta=0.1")


@pytest.mark.usefixtures("maxrl")
def test_a_wrong_name_is_refused_with_all_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        read("algorithm.name=maxlr")
    message = str(caught.value)
    assert "\"maxlr\" is no objective; did you mean 'maxrl'?" in message
    assert "gae, tppo, appo, grpo" in message and "maxrl (stranger 1.0)" in message


def test_without_the_package_the_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="installed packages add: none"):
        read("algorithm.name=maxrl")


BROKEN = {
    "no module": ("", ENTRY.replace("stranger:", "nowhere:"), "cannot be loaded: ModuleNotFound"),
    "raises": ("1 / 0", ENTRY, "cannot be loaded: ZeroDivisionError: division by zero"),
    "no record": ("MAXRL = 3", ENTRY, "but stranger:MAXRL is 3; expected an ObjectiveRecord"),
    "two functions": (
        MAXRL.replace("function=advantages", "function=advantages, baseline='critic'"),
        ENTRY,
        "cannot be loaded: ValueError: an objective with a function has no critic",
    ),
    "a built-in name": (MAXRL, ENTRY.replace("maxrl", "grpo"), "the name of a built-in member"),
}


@pytest.mark.parametrize(("source", "entry", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_package_is_named(tmp_path: Path, source: str, entry: str, message: str) -> None:
    with (
        installed(tmp_path, "stranger", entry, source),
        pytest.raises(ConfigError, match=f"stranger 1.0 adds '.*{message}"),
    ):
        read("algorithm.name=maxrl")


def test_defaults_of_keys_that_do_not_exist_are_refused_with_the_name(tmp_path: Path) -> None:
    source = MAXRL.replace("function=", "defaults={'klip': 0.1}, function=")
    with (
        installed(tmp_path, "stranger", ENTRY, source),
        pytest.raises(ConfigError, match=r"the objective 'maxrl' has defaults of .*: klip"),
    ):
        read("algorithm.name=maxrl")


def test_defaults_of_a_record_stand_below_the_keys_of_the_run_file(tmp_path: Path) -> None:
    source = MAXRL.replace("function=", "defaults={'kl': 0.25, 'clip': 0.3}, function=")
    with installed(tmp_path, "stranger", ENTRY, source):
        settings = ("algorithm.name=maxrl", "algorithm.clip=0.1")
        algorithm = load(RUN_FILE, settings).algorithm
    assert (algorithm.clip, algorithm.name) == (0.1, "maxrl")


def test_a_formula_that_fails_ends_the_run_by_name_and_line(tmp_path: Path) -> None:
    source = MAXRL.replace("if means[g] else 0.0", "")
    with installed(tmp_path, "stranger", ENTRY, source):
        objective = resolve(load(RUN_FILE, ("algorithm.name=maxrl",)).algorithm, 8)
        with pytest.raises(
            ConfigError,
            match=r"algorithm.name = 'maxrl' failed: ZeroDivision.* \(stranger.py, line",
        ):
            row_rewards(objective, [0.0, 0.0], [0, 0])
