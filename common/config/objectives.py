"""The objectives: one record for each `algorithm.name`, and the keys that each record decides.

A record says what an objective needs and how its advantages are made, in facts: the config takes
its checks and defaults from them, the learner the arguments of its formulas
(`learner/training/objectives.py`). Nothing else in this software knows an objective by its name.

A package adds an objective (`foreign/plugins.py`): a record at an entry point, with a formula of
its own where no built-in one fits.

    [project.entry-points."prefixrl.objectives"]
    maxrl = "my_package.maxrl:MAXRL"

    def advantages(rewards: list[float], groups: list[int]) -> list[float]:
        '''Return (reward - mean) / mean of each row; the mean is that of the row's group.'''
        ...

    MAXRL = ObjectiveRecord(advantage="(r_i − mean r) / mean r", function=advantages)

This file imports no torch: workers, which compute no advantage, read the config too.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from prefixrl.common.config.foreign.plugins import Plugin, check_names, load_plugin, names, plugins

AdvantageFunction = Callable[[list[float], list[int]], Sequence[float]]
"""Returns the advantage of every row of an iteration, from the rewards and groups of all rows."""


@dataclass(frozen=True)
class ObjectiveRecord:
    """Facts of one objective."""

    advantage: str
    """The advantage of token t before whitening, as docs/objectives.md writes it."""
    baseline: Literal["critic", "mean", "leave_one_out"] = "mean"
    """A reward is compared with the critic's value, the mean of its group, or the mean of the other
    rows of its group."""
    function: AdvantageFunction | None = None
    """Formula in place of the baseline; a pure function, since every learner rank calls it."""
    divides_by_deviation: bool = False
    """The advantage is divided by the deviation of the rewards."""
    discounts: bool = False
    """`gamma` discounts inside a row."""
    has_lambda: bool = False
    """Every token has a value, so that `gae_lambda` acts."""
    whitening: Literal["on", "off", "always", "never"] = "never"
    """Whitening of advantages over the iteration; `whiten` acts on "on" and "off", its defaults."""
    is_one_action: bool = False
    """A row is one action: one ratio by default, one value, one advantage."""
    divisor: Literal["tokens", "rows", "longest_row"] = "tokens"
    """The sum of the loss is divided by tokens (`aggregation` acts), by rows, or by rows times the
    most tokens that a row may have."""
    takes_function: bool = False
    """`advantage_function` may take the place of the baseline."""
    has_implicit_reward: bool = False
    """[implicit_reward] is always on."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of [algorithm] whose defaults differ from those of the others."""

    def __post_init__(self) -> None:
        if self.function is not None and (self.has_critic or self.takes_function):
            raise ValueError("an objective with a function has no critic and takes no other one")
        if self.function is not None and (self.divides_by_deviation or self.has_implicit_reward):
            raise ValueError("a function has no baseline for a deviation or an implicit reward")

    @property
    def has_critic(self) -> bool:
        """True if the objective learns values; the others load no critic."""
        return self.baseline == "critic"

    @property
    def is_whitened(self) -> bool:
        """True if advantages are whitened where the key `whiten` is absent."""
        return self.whitening in ("on", "always")

    @property
    def leaves_one_out(self) -> bool:
        """True if a row's own reward is no part of its baseline."""
        return self.baseline == "leave_one_out" and self.function is None


OBJECTIVES: Mapping[str, ObjectiveRecord] = {
    "gae": ObjectiveRecord(
        advantage="GAE(γ, λ) of the token rewards",
        baseline="critic",
        discounts=True,
        has_lambda=True,
        whitening="on",
    ),
    "tppo": ObjectiveRecord(
        advantage="the same with γ = 1", baseline="critic", has_lambda=True, whitening="on"
    ),
    "appo": ObjectiveRecord(
        advantage="`r − β Σ_s k_s − V(x)`, one for the prefix",
        baseline="critic",
        whitening="on",
        is_one_action=True,
        divisor="rows",
    ),
    "grpo": ObjectiveRecord(
        advantage="`(r_i − mean r) / (std r + 1e-6) − β Σ_{s≥t} k_s`",
        divides_by_deviation=True,
        takes_function=True,
    ),
    "dr_grpo": ObjectiveRecord(
        advantage="`r_i − mean r − β Σ_{s≥t} k_s`", divisor="longest_row", takes_function=True
    ),
    "rloo": ObjectiveRecord(
        advantage="`r_i − mean of the others − β Σ_{s≥t} k_s`",
        baseline="leave_one_out",
        whitening="off",
        takes_function=True,
    ),
    "reinforce_baseline": ObjectiveRecord(
        advantage="`r_i − mean r − β Σ_{s≥t} k_s`", whitening="always", takes_function=True
    ),
    "prime": ObjectiveRecord(
        advantage="as `rloo`, and process rewards (`docs/process_rewards.md`)",
        baseline="leave_one_out",
        whitening="on",
        has_implicit_reward=True,
        defaults={"kl": 0.0, "entropy": 0.0},
    ),
}


class KeyRule(NamedTuple):
    """The objectives under which a key of [algorithm] has an effect."""

    has_effect: Callable[[ObjectiveRecord], bool]
    reason: str
    """Why it has none under the others."""


_NO_CRITIC = "the others have no critic"
KEY_RULES: Mapping[str, KeyRule] = {
    "gamma": KeyRule(
        lambda record: record.discounts,
        "with the others the prefix is one action and nothing is discounted inside it",
    ),
    "gae_lambda": KeyRule(lambda record: record.has_lambda, "the others have no value per token"),
    "value_clip": KeyRule(lambda record: record.has_critic, _NO_CRITIC),
    "critic_warmup_steps": KeyRule(lambda record: record.has_critic, _NO_CRITIC),
    "zscore": KeyRule(
        lambda record: record.divides_by_deviation,
        "the others do not divide by a deviation of rewards",
    ),
    "aggregation": KeyRule(
        lambda record: record.divisor == "tokens",
        "the others divide by rows, or by rows x most tokens of a row",
    ),
    "whiten": KeyRule(
        lambda record: record.whitening in ("on", "off"), "the others whiten always or never"
    ),
    "advantage_function": KeyRule(
        lambda record: record.takes_function,
        "the others have a critic, rewards of tokens or a function of their own",
    ),
}


def names_with(key: str) -> tuple[str, ...]:
    """Return the built-in names under which a key of `KEY_RULES` has an effect."""
    return tuple(name for name, rec in OBJECTIVES.items() if KEY_RULES[key].has_effect(rec))


def objective_record(name: str) -> ObjectiveRecord | None:
    """Return the record of a built-in objective or of an installed package's; None without one.

    Raises:
        ConfigError: a package adds a built-in name, or its record cannot be used.
    """
    check_names("objectives", OBJECTIVES)
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    plugin = plugins("objectives").get(name)
    return None if plugin is None else _plugged_in(plugin)


@cache
def _plugged_in(plugin: Plugin) -> ObjectiveRecord:
    return load_plugin(plugin, ObjectiveRecord, "an ObjectiveRecord")


def checked_objective(name: str) -> str:
    """Return the name of an objective; ValueError for a name without a record."""
    if objective_record(name) is not None:
        return name
    added = ", ".join(
        f"{plugin.name} ({plugin.package})" for plugin in plugins("objectives").values()
    )
    nearest = difflib.get_close_matches(name, names("objectives", OBJECTIVES), n=1, cutoff=0.5)
    near = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ValueError(
        f'"{name}" is no objective{near} The names are {", ".join(OBJECTIVES)}; names that '
        f"installed packages add: {added or 'none'}; a package that adds another one must be "
        f"installed on this host"
    )
