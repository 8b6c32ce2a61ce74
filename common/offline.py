"""What `prefixrl eval` and `prefixrl generate` ask the process that works for them, and what they get back."""

from typing import Literal

import msgspec

from prefixrl.common.accuracy import Accuracy
from prefixrl.common.errors import DataError
from prefixrl.common.messages import VerdictStatus

PLAN_FILE, RESULTS_FILE, ANSWERS_FILE = "plan.json", "results.json", "answers.jsonl"
GREEDY, SAMPLED = "greedy", "sampled"
"""Decodings: SAMPLED draws at the temperatures of the config."""
PREFIX_ARMS = ("no_prefix", "fixed_prefix", "prefix_clustering", "adapter")


class Plan(msgspec.Struct, frozen=True):
    """What to judge."""

    config: str
    """The resolved config as JSON: its adapter is to be judged on its held-out problems, its directory is the evaluation's."""
    label: str
    """Of the run, in tables."""
    kind: str
    """What the run trained, in words: mode, low-rank or not, models. Only runs of one kind have a mean."""
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
    asked: str = ""
    """Digest of the questions and gold answers: figures of other problems are no comparison."""
    kind: str = ""
    """Of the run, as in `Plan`."""


class Results(msgspec.Struct, frozen=True):
    """Everything that was judged, and the names of what was not."""

    results: list[Result]
    incomplete: list[str]


class GenerationPlan(msgspec.Struct, frozen=True):
    """What to answer: the held-out problems of a config, all of them, gold answers or not."""

    config: str
    """The resolved config as JSON, as in `Plan`."""
    version: int
    """Iterations the adapter was trained for; 0 also where no run trained it."""
    published: tuple[str, ...]
    """As in `Plan`."""
    decoding: str
    samples: int
    """Answers to each problem."""


class Answer(msgspec.Struct, frozen=True):
    """One line of `prefixrl generate`: an answer, or why there is none."""

    source: str
    file: str
    row: int
    """Where the problem stands in the file, from 1."""
    id: str
    """Of the problem; as all fields of it empty where the row could not be read."""
    question: str
    """As it was asked, a problem set's suffix included."""
    gold: str | None
    family: str
    status: VerdictStatus | Literal["bad_row", "failed"]
    """bad_row: the row is no problem. failed: nothing came of it. Else what the verdict says."""
    reason: str = ""
    """Why there is no answer, or no verdict although there is a gold answer."""
    sample: int = 0
    """Which answer to the problem this is, from 0."""
    prefix: str = ""
    completion: str = ""
    """In direct mode the adapter's own answer."""
    extracted: str | None = None
    """The answer found in the text."""
    reward: float | None = None
    """None where nothing is judged."""
    finish: str = ""
    """What ended the text; `length`: it was cut."""
    prefix_tokens: int = 0
    completion_tokens: int = 0
    version: int = -1
    """Of the adapter: iterations it was trained for; -1 where there is no answer."""
    weights_digest: str = ""
    columns: dict[str, object] = {}
    """Columns of the row that are no part of the problem, as they stand there."""


def check_weights(version: int, held: str, published: tuple[str, ...]) -> None:
    """Raise DataError when what rollouts held is not what the run published as this version."""
    if held and published and held not in published:
        raise DataError(
            f"the checkpoint of version {version} holds weights with digest {held}, the run published "
            f"{', '.join(published)}: it is not the version it says; name another --checkpoint"
        )
