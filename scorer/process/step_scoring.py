"""Rewards of texts by a process reward model and the verifier; a group's texts are scored together, in order."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from prefixrl.common.config.workers.engines import built_in_names, engine_record
from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.wire.messages.fields import cut_text
from prefixrl.common.wire.messages.groups import Fault, StepScores, TextVerdict
from prefixrl.common.wire.verdicts import aggregated
from prefixrl.scorer.process.steps import Step, combined_reward, split_steps, token_ends

if TYPE_CHECKING:
    from prefixrl.scorer.process.formats import Marked, StepForm

LEAST_SPREAD = 1e-6
_TRIALS = (
    ("What is 2 + 3?", ("We add 2 and 3.", "2 + 3 = 5.", "So the answer is 5.")),
    ("What is 2 + 3?", ("The moon is blue.", "2 + 3 = 97.", "So the answer is 0.")),
    ("Compute 12 * 4.", ("12 * 4 = 48.",)),
    ("Compute 12 * 4.", ("7 7 7 7 7", "Nothing follows.")),
)
"""Right and absurd solutions. A model that scores both alike is not a process reward model."""


class StepModel(ABC):
    """A process reward model in some engine."""

    most_positions: int | None
    """The longest text that the model has positions for; None where it names no limit."""

    def scores(self, rows: "Sequence[Marked]") -> list[list[float]]:
        """Return the score of every step of every row."""
        with_steps = [row for row in rows if row.tag_positions]
        scores = iter(self.step_scores(with_steps) if with_steps else ())
        return [list(islice(scores, len(row.tag_positions))) for row in rows]

    @abstractmethod
    def step_scores(self, rows: "Sequence[Marked]") -> Iterable[float]:
        """Return the scores of all steps of rows that have some, in order."""


@dataclass(frozen=True)
class JudgedText:
    """A text with the verdict of the verifier."""

    question: str
    answer: str
    pieces: Callable[[], list[str]] | None
    """Returns the text that each token adds to the answer; None where no tokens are known."""
    verdict: TextVerdict


@dataclass(frozen=True)
class _Unscorable:
    """A text that the model cannot score."""

    reason: str
    fault: Fault


class StepScoring:
    """A process reward model with its form, and the coefficients of a run."""

    def __init__(
        self,
        settings: ProcessModelConfig,
        form: "StepForm",
        model: StepModel,
    ) -> None:
        """Score the trial texts; raises DataError for a model that finds them all equally good."""
        self._settings = settings
        self._form = form
        self._model = model
        if model.most_positions is not None and settings.max_tokens > model.most_positions:
            raise ConfigError(
                f"scorer.prm.max_tokens = {settings.max_tokens}: {settings.model} has positions for "
                f"{model.most_positions}; lower max_tokens to that"
            )
        # A head that was not loaded, or is read beside the tags, scores all steps alike.
        rows = [form.marked_text(*trial) for trial in _TRIALS]
        scores = [score for of_row in model.scores(rows) for score in of_row]
        if (
            not all(math.isfinite(score) for score in scores)
            or max(scores) - min(scores) < LEAST_SPREAD
        ):
            raise DataError(
                f"scorer.prm.model: {settings.model} gives the steps of right and nonsensical answers the scores "
                f"{min(scores):g} to {max(scores):g}: a constant reward teaches nothing; check format, step_tag and, "
                f'with format = "step_tag", good_token and bad_token'
            )

    def rewarded_verdicts(self, texts: Sequence[JudgedText]) -> list[TextVerdict]:
        """Return the verdicts with rewards of both sources; `error` where a text cannot be scored."""
        steps = [self._steps(text.answer) for text in texts]
        rows = [self._row(text.question, part) for text, part in zip(texts, steps, strict=True)]
        scores = iter(self._model.scores([row for row in rows if not isinstance(row, _Unscorable)]))
        return [
            _failed(text.verdict, row.reason, row.fault)
            if isinstance(row, _Unscorable)
            else self._verdict(text, [step.end for step in part], next(scores))
            for text, part, row in zip(texts, steps, rows, strict=True)
        ]

    def answer_scores(self, question: str, answers: Sequence[str]) -> list[float]:
        """Return one score for each answer to a question; 0 for an answer that cannot be scored."""
        rows = [self._row(question, self._steps(answer)) for answer in answers]
        scores = iter(self._model.scores([row for row in rows if not isinstance(row, _Unscorable)]))
        how = self._settings.aggregate
        return [
            0.0 if isinstance(row, _Unscorable) else aggregated(next(scores), how) for row in rows
        ]

    def _steps(self, answer: str) -> list[Step]:
        return split_steps(answer, self._settings.between, self._settings.most_steps)

    def _row(self, question: str, steps: Sequence[Step]) -> "Marked | _Unscorable":
        try:
            row = self._form.marked_text(question, [step.text for step in steps])
        except ValueError as error:
            return _Unscorable(str(error), "steps without a score")
        limit = self._settings.max_tokens
        if row.tokens.size <= limit:
            return row
        reason = f"{row.tokens.size} tokens with the question, scorer.prm.max_tokens = {limit}"
        return _Unscorable(reason, "too long for the process reward model")

    def scored_verdicts(self, texts: Sequence[JudgedText]) -> list[TextVerdict]:
        """Return the verdicts as they are, with the scores of the texts that can be scored."""
        scored = self.rewarded_verdicts(texts)
        return [
            replace(text.verdict, process=verdict.process)
            for text, verdict in zip(texts, scored, strict=True)
        ]

    def _verdict(self, text: JudgedText, ends: list[int], scores: list[float]) -> TextVerdict:
        if not all(math.isfinite(score) for score in scores):
            return _failed(text.verdict, f"scores of steps are {scores}", "steps without a score")
        settings = self._settings
        outcome = text.verdict.reward
        step_scores = StepScores(outcome, tuple(scores), _ends(text, ends))
        if settings.placement == "step":  # the learner adds the scores, each at its token
            if len(step_scores.ends) == len(scores):
                return replace(text.verdict, process=step_scores)
            reason = "the tokens of the answer do not tell where its steps end"
            return _failed(text.verdict, reason, "steps without a score")
        score = aggregated(scores, settings.aggregate)
        reward = combined_reward(outcome, score, settings.outcome_coefficient, settings.coefficient)
        return replace(text.verdict, reward=reward, process=step_scores)


def _ends(text: JudgedText, ends: list[int]) -> tuple[int, ...]:
    pieces = text.pieces() if text.pieces is not None else []
    # A stop text cuts an answer, and a tokenizer may decode a piece otherwise than alone.
    if not "".join(pieces).startswith(text.answer):
        return ()
    return token_ends(pieces, ends)


def _failed(verdict: TextVerdict, reason: str, fault: Fault) -> TextVerdict:
    return replace(verdict, reward=0.0, status="error", extracted=cut_text(reason), fault=fault)


def load_scoring(settings: ProcessModelConfig, folder: str) -> StepScoring:
    """Load the process reward model of a run; ConfigError or DataError if it cannot score."""
    # Late: a scorer without a model needs neither transformers nor torch.
    from prefixrl.common.engines.make import loading_function
    from prefixrl.common.prompts.tokenizer import load_tokenizer
    from prefixrl.scorer.process.formats import StepForm

    target = engine_record(settings.engine).step_model
    if not target:
        allowed = ", ".join(built_in_names("process reward model"))
        raise ConfigError(
            f'scorer.prm.engine = "{settings.engine}": this engine scores no steps; use one of {allowed}'
        )
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise DataError(f"scorer.prm.model: {error}") from error
    form = StepForm(tokenizer, settings)
    load = loading_function(target, f'scorer.prm.engine = "{settings.engine}"')
    return StepScoring(settings, form, load(folder, settings, form))
