"""Plans of `prefixrl eval` and `generate`, and their results."""

from typing import Literal

import msgspec

from prefixrl.common.errors import DataError
from prefixrl.common.evaluation.accuracy import Accuracy
from prefixrl.common.wire.messages.groups import VerdictStatus

PLAN_FILE = "plan.json"
RESULTS_FILE = "results.json"
ANSWERS_FILE = "answers.jsonl"
GREEDY, SAMPLED = "greedy", "sampled"
"""Decodings: SAMPLED draws at the temperatures of the config."""
PREFIX_ARMS = ("no_prefix", "fixed_prefix", "prefix_clustering", "adapter")


class OfflinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter and the problems that it answers: to judge arms, or for the answers."""

    config: str
    """The resolved config as JSON: its adapter answers its held-out problems, in its directory."""
    version: int
    """Iterations the adapter was trained for; 0 also where no run trained it."""
    published: tuple[str, ...]
    """Digests under which that version was published; empty where the run's journal names none."""
    samples: int
    """Sampled answers to each problem. An evaluation always asks for a greedy answer, too."""
    arms: tuple[str, ...] = ()
    """The arms to judge; without any the rows are answered, with or without gold answers."""
    decoding: str = GREEDY
    """Decoding of given rows."""
    label: str = ""
    """Name of the run in tables."""
    kind: str = ""
    """Mode, low-rank or not, and models of the run, in words. Only runs of one kind have a mean."""
    opening_tokens: int = 0
    """Prefix clustering: tokens of the target's own answers that are an opening."""

    def check_weights(self, digest: str) -> None:
        """Raise DataError where the digest of the weights that rollouts held is not a published one."""
        if digest and self.published and digest not in self.published:
            raise DataError(
                f"the checkpoint of version {self.version} holds weights with digest {digest}, the run published "
                f"{', '.join(self.published)}: it is not the version it says; name another --checkpoint"
            )


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one set."""

    run: str
    arm: str
    set: str
    decoding: str
    version: int
    """Version of the adapter; -1 for arms without one."""
    weights_digest: str
    prefix: str
    """The fixed prefix, "" where there is none."""
    errors: int
    """Answers whose verifier failed. No figure counts them."""
    accuracy: Accuracy
    questions_digest: str = msgspec.field(default="", name="asked")
    """Digest of the questions and gold answers: figures of other problems are no comparison."""
    kind: str = ""
    """Kind of the run, as in `OfflinePlan`."""
    means: dict[str, float] = {}
    """Mean reward by problem: arms are compared problem by problem."""
    trained_on: int = 0
    """Problems whose question stands in the run's training data too."""


class EvaluationResults(msgspec.Struct, frozen=True):
    """Results of the judged arms, and the names of the incomplete arms."""

    results: list[ArmResult]
    incomplete: list[str]


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `prefixrl generate`: an answer, or why there is none."""

    source: str
    file: str
    row: int
    """Number of the row in the file, from 1."""
    id: str = ""
    """Id of the problem; empty, like its other fields, where the row could not be read."""
    question: str = ""
    """The text that was asked, a problem set's suffix included."""
    gold: str | None = None
    family: str = ""
    status: VerdictStatus | Literal["bad_row", "failed"]
    """bad_row: the row is no problem. failed: no answer came. Else the status of the verdict."""
    reason: str = ""
    """Reason that there is no answer, or no verdict although there is a gold answer."""
    sample: int = 0
    """Number of the answer to the problem, from 0."""
    prefix: str = ""
    completion: str = ""
    """In direct mode the adapter's own answer."""
    extracted: str | None = None
    """The answer found in the text."""
    reward: float | None = None
    """None where nothing is judged."""
    finish: str = ""
    """End of the text; `length`: it was cut."""
    scores: tuple[float, ...] | None = None
    """Score of every step, with a process reward model and several answers to the problem."""
    prefix_tokens: int = 0
    completion_tokens: int = 0
    version: int = -1
    """Iterations the adapter was trained for; -1 where there is no answer."""
    weights_digest: str = ""
    columns: dict[str, object] = {}
    """Columns of the row that are no part of the problem, unchanged."""
