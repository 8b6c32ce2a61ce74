"""The plan of a replay: the learner of a run trains again on the samples in its journal.

RUN ── config.json, changes.jsonl, settings ──▶ parts: the settings of the learner from an iteration on ──▶ replay.json
"""

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from prefixrl.common.config.algorithm import AlgorithmConfig
from prefixrl.common.config.load import changed
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.run import json_lines
from prefixrl.common.run.changes import (
    CHANGES_FILE,
    WEIGHTS_KEY,
    ChangeLine,
    KeyPath,
    settings_besides,
)

PLAN_FILE = "replay.json"
_DRAWN = {
    "groups_per_iteration": "an iteration has the groups that the run trained in it",
    "samples_per_prompt": "a group has the samples that the run drew",
    "max_staleness": "it decides when samples are drawn, and these are there",
    "admission": "it decides when samples are drawn, and these are there",
    "min_ess": "it decides when samples are drawn, and these are there",
}
_JUDGED = "the verdicts are those in the journal"
_REASONS = {
    **{f"algorithm.{key}": reason for key, reason in _DRAWN.items()},
    "data": "the problems are those that the run asked",
    "scorer": _JUDGED,
    "reward": _JUDGED,
    "filter": "the groups are those that the run trained",
    "evaluation": "a replay judges nothing; `prefixrl eval` judges its checkpoints",
    "broker": "a replay has no broker and no workers",
    "slurm": "a replay runs on this machine",
}
_OTHER_REASON = "the samples are those in the journal, and no others are drawn"
_LEARNERS_SECTIONS = ("seed", "directory", "learner", "implicit_reward", "checkpoint", "log")
LEARNERS_KEYS: frozenset[KeyPath] = frozenset(
    {(name,) for name in (*_LEARNERS_SECTIONS, "launch")}
    | {("adapter", "reference")}
    | {("algorithm", key) for key in AlgorithmConfig.model_fields.keys() - _DRAWN}
)
"""Keys and sections that act on the learner alone, so that a replay may have others."""


class ReplayPart(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the learner from an iteration on."""

    first: int
    config: str
    """The config as JSON; its directory is that of the replay."""
    changes: tuple[ChangeLine, ...] = ()
    """Changes that a person made there, for `changes.jsonl`."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `replay.json`, by which a directory is known as that of a replay."""

    source: str
    """Directory of the run whose journal is read."""
    run_id: str
    iterations: int
    problems: int
    """Training problems of the run."""
    parts: tuple[ReplayPart, ...]
    """In the order of their iterations; the first begins at 0."""
    returns: dict[int, int]
    """Versions at which the run went back to other weights, with the version of those."""
    functions: tuple[str, ...]
    """Digests of the user's functions of the learner."""
    settings: tuple[str, ...]
    """Settings of the command that made the plan, for the sentence that repeats it."""

    def command(self, directory: Path) -> str:
        """Return the command that makes the replay, or goes on with it, to be copied."""
        flags = [flag for setting in self.settings for flag in ("--set", setting)]
        return to_copy("prefixrl replay", self.source, *flags, "--out", directory)

    def part_at(self, iteration: int) -> ReplayPart:
        """Return the part that trains an iteration."""
        return next(part for part in reversed(self.parts) if part.first <= iteration)

    def end_of(self, part: ReplayPart) -> int:
        """Return the iterations that are trained when a part ends."""
        later = (each.first for each in self.parts if each.first > part.first)
        return min((*later, self.iterations))


def plan_of(directory: Path) -> ReplayPlan | None:
    """Return the plan of a replay; None for a directory of anything else; raise DataError for a damaged one."""
    return json_lines.document(directory / PLAN_FILE, ReplayPlan)


def check_is_no_replay(directory: Path) -> None:
    """Raise ConfigError where a replay stands: nothing is sampled in it, and it has no journal."""
    if plan := plan_of(directory):
        raise ConfigError(
            f"{directory} holds a replay of {plan.source}, in which nothing is sampled; give the directory of a run. "
            f"A run begins with the weights of a replay by adapter.init_from"
        )


def check_settings(before: RunConfig, after: RunConfig) -> None:
    """Raise ConfigError for settings that a replay cannot have: with them the run would have had other samples."""
    old, new = (
        dict(settings_besides(config.model_dump(mode="json"), LEARNERS_KEYS))
        for config in (before, after)
    )
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    # The end of a run by epochs may be given in iterations.
    if after.data.epochs is None and after.algorithm.iterations is not None:
        keys = [key for key in keys if key != "data.epochs"]
    if keys:
        lines = "".join(f"\n  {key}: {_reason_against(key)}" for key in keys)
        raise ConfigError(f"a replay trains on the samples that a run has drawn:{lines}")


def _reason_against(key: str) -> str:
    """Return why a replay cannot have another value of a key."""
    return _REASONS.get(key) or _REASONS.get(key.partition(".")[0]) or _OTHER_REASON


def parts_of(
    config: RunConfig, lines: Sequence[ChangeLine], settings: tuple[str, ...], iterations: int
) -> tuple[ReplayPart, ...]:
    """Return the parts of a run that a person may have changed on its way, with settings over all of them.

    Args:
        config: of the run as it is now.
        lines: its `changes.jsonl`.
        settings: `KEY=VALUE`, those of the replay.
        iterations: the length of the replay.
    """
    persons = [line for line in lines if not line.reason]
    first_values = {line.key: line.before for line in reversed(persons)}
    now = _with_values(config, first_values)
    configs = {0: now}
    for at in sorted({line.iteration for line in persons}):
        values = {line.key: line.after for line in persons if line.iteration == at}
        now = configs[at] = _with_values(now, values)
    parts: list[ReplayPart] = []
    before: RunConfig | None = None
    for at, part_config in configs.items():
        if at > 0 and at >= iterations:
            break
        after = changed(part_config, settings, "--set")
        # What a setting of the replay holds fixed does not change on the way.
        acting = tuple(
            line
            for line in persons
            if line.iteration == at
            and before is not None
            and attrgetter(line.key)(before) != attrgetter(line.key)(after)
        )
        if before is None or acting:
            parts.append(ReplayPart(first=at, config=after.model_dump_json(), changes=acting))
        before = after
    return tuple(parts)


def _with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    # Together: one of algorithm.iterations and data.epochs is always there.
    settings = (
        f"{key}={json.dumps(value)}"
        for key, value in values.items()
        if value is not None or attrgetter(key)(config) is not None
    )
    return changed(config, tuple(settings), CHANGES_FILE)


def returns_of(lines: Sequence[ChangeLine]) -> dict[int, int]:
    """Return the ways back of a run: by version, the version of the weights that it took."""
    return {
        line.iteration: line.after
        for line in lines
        if line.key == WEIGHTS_KEY and line.reason and isinstance(line.after, int)
    }
