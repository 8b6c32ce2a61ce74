"""The choice of the best among several answers to a problem: by votes, or by the run's process reward model."""

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.engines.make import loading_function
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.equality import first_equals
from prefixrl.common.host.hub import model_folder
from prefixrl.common.prompts.extract import extract_answer

SCORING = "prefixrl.scorer.process.step_scoring:load_scoring"


class Chooser(Protocol):
    """A rule for the best answer."""

    def best_index(self, problem: str, answers: Sequence[str]) -> int:
        """Return the index of the best answer; it may take seconds."""


class Votes:
    """The answer that most texts have, by the verifier; the earliest of several."""

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()

    def best_index(self, _problem: str, answers: Sequence[str]) -> int:
        """Return the index of the first text that has the most frequent answer."""
        texts = [extract_answer(answer) for answer in answers]
        names = sorted({text for text in texts if text is not None})
        firsts = dict(zip(names, range(len(names)), strict=True))
        if len(names) > 1:
            with self._lock:  # a process for one request at a time
                firsts = dict(zip(names, first_equals([names], self._timeout_s)[0], strict=True))
        return most_frequent([None if text is None else firsts[text] for text in texts])


def most_frequent(ballots: Sequence[int | None]) -> int:
    """Return the index of the first ballot for the most frequent choice, 0 without any.

    Args:
        ballots: the choice of each text; None for a text without an answer.
    """
    counts = Counter(ballot for ballot in ballots if ballot is not None)
    if not counts:
        return 0
    # Counts stay in the order of first ballots: of several, the earliest wins.
    (winner, _), *_ = counts.most_common(1)
    return ballots.index(winner)


class StepRewards:
    """The answer whose steps the process reward model scores highest."""

    def __init__(self, section: ProcessModelConfig) -> None:
        """Load the model; raises ConfigError or DataError if it cannot score."""
        load = loading_function(SCORING, "scorer.prm")
        self._scoring: Any = load(section, model_folder(section.model))
        self._lock = Lock()

    def best_index(self, problem: str, answers: Sequence[str]) -> int:
        """Return the index of the highest score, the earliest of equals."""
        with self._lock:
            scores: list[float] = self._scoring.answer_scores(problem, answers)
        return max(range(len(answers)), key=scores.__getitem__)


def load_chooser(config: RunConfig) -> Chooser:
    """Return the rule for a run: its process reward model if it has one, else votes."""
    if config.scorer.prm is not None:
        return StepRewards(config.scorer.prm)
    if config.reward.function is not None or config.reward.url is not None:
        key = "reward.function" if config.reward.function is not None else "reward.url"
        raise ConfigError(
            f"--best-of votes on answers in \\boxed{{}}, but this run judges by {key}, which needs the gold answer; "
            "name a process reward model: --set scorer.prm.model=FOLDER"
        )
    return Votes(config.scorer.verify_timeout_s)
