"""The report of a warm start, and what a run that begins with one must share with it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError

PLAN_FILE = "warm_start_plan.json"
RECORD_FILE = "warm_start.json"
EPOCHS_FILE = "epochs.jsonl"
FORM_KEYS = ("rollout.prefix_tokens", "rollout.stop_tokens", "rollout.own_stops")
"""Keys that decide where a prefix ends."""
ROLE_KEYS = ("mode", "target.placement")
"""Keys that decide what a prefix is."""
PROMPT_KEYS = tuple(
    f"adapter.{key}"
    for key in ("chat_template", "system", "template_options", "prompt_template", "sees")
)


class WarmStartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for the process that trains."""

    config: str
    """The run file's config as JSON; its directory is that of the warm start."""
    answers: str
    """Digest of all that decides the answers, but their number."""
    samples: int
    problems: int | None
    """Training problems that are answered, from the first on; None for all."""
    arm: str
    """Beginning of the names of the evaluations whose answers are used."""
    teacher: str
    min_reward: float | None
    """Least reward of an answer that is used; None: all are."""
    held_out_fraction: float
    """Share of the problems whose examples only judge."""
    epochs: int
    batch_rows: int
    patience: int
    lr: float


class EpochLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `epochs.jsonl`."""

    epoch: int
    """Number of the epoch, from 1; 0 before training."""
    loss: float | None
    """Mean loss of the epoch's steps, nats per token; None before training."""
    held_out_loss: float
    """Loss of the held-out examples after it."""
    held_out_by_place: tuple[float, ...]
    """The same by the place of a token in its prefix, as far as prefixes go."""
    seconds: float


class WarmStartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The report: examples, losses, costs."""

    adapter: str
    teacher: str
    """The run whose adapter wrote the prefixes; "" where they begin the target's own answers."""
    settings: dict[str, object]
    """Values of the keys that a run which begins with it must share."""
    answers: int
    """Answers that were judged."""
    right: int
    """Answers whose reward is at least `min_reward`, or all of them."""
    examples: int
    held_out_examples: int
    target_tokens: int
    """Tokens of all answers."""
    trained_tokens: int
    """Tokens of prefixes in all epochs."""
    epochs: Sequence[EpochLine]
    best_epoch: int
    seconds: float


def shared_settings(config: RunConfig) -> dict[str, object]:
    """Return the values of the keys that decide what is written, and after which prompt."""
    document = config.model_dump(mode="json")
    values = {}
    for key in (*ROLE_KEYS, *FORM_KEYS, *PROMPT_KEYS):
        section, _, name = key.partition(".")
        part = document[section]
        values[key] = part[name] if name and part else part
    return values


def check_warm_start(config: RunConfig) -> None:
    """Raise ConfigError where a run begins with a warm start that was trained to write something else."""
    start = config.adapter.init_from
    if start is None:
        return
    path = Path(start).parent.parent / RECORD_FILE
    if not path.is_file():
        return
    trained, here = read_json(path, WarmStartRecord).settings, shared_settings(config)
    for key, value in trained.items():
        if here.get(key, value) != value:
            raise ConfigError(
                f"adapter.init_from = {start!r} was trained to write prefixes with {key} = {value!r}, this run has "
                f"{here[key]!r}: it would go on where it never learned to; set it to {value!r}, or make the warm "
                f"start anew"
            )
