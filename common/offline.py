"""What `prefixrl eval` asks the process that judges for, and what it gets back: two files of the evaluation's directory."""

import msgspec

from prefixrl.common.accuracy import Accuracy

PLAN_FILE, RESULTS_FILE = "plan.json", "results.json"
PREFIX_ARMS = ("no_prefix", "fixed_prefix", "prefix_clustering", "adapter")


class Plan(msgspec.Struct, frozen=True):
    """What to judge."""

    config: str
    """The resolved config as JSON: its adapter is to be judged on its held-out problems, its directory is the evaluation's."""
    label: str
    """Of the run, in tables."""
    version: int
    """Iterations the adapter was trained for."""
    published: tuple[str, ...]
    """Digests under which that version was published; empty where the run's journal names none."""
    arms: tuple[str, ...]
    samples: int
    """Answers to each problem at the run's temperatures, besides the greedy one; 0: none."""
    opening_tokens: int
    """Prefix clustering: how much of the target's own answers is an opening."""


class Result(msgspec.Struct, frozen=True):
    """One arm on one set."""

    run: str
    arm: str
    set: str
    decoding: str
    version: int
    """Of the adapter; -1 for arms without one."""
    weights_digest: str
    prefix: str
    """The fixed prefix, "" where there is none."""
    errors: int
    """Answers whose verifier failed, in none of the figures."""
    accuracy: Accuracy


class Results(msgspec.Struct, frozen=True):
    """Everything that was judged, and the names of what was not."""

    results: list[Result]
    incomplete: list[str]
