"""Work of an iteration, and the seconds it takes at declared speeds: pure formulas."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class IterationWork:
    """One iteration of the learner: passes over its rows, and how long they are."""

    rows: int
    prompt_tokens: int
    """Tokens of a prompt; an estimate before the tokenizer is read."""
    sampled_tokens: int
    """Most tokens that the adapter writes per row."""
    prompts: int
    """Prompts that a forward computes: one per line of rows that share it."""
    epochs: int
    has_critic: bool
    has_reference: bool
    is_measured: bool
    """True if the proximal policy is measured by a forward pass of its own."""
    is_checkpointed: bool
    is_scored: bool = False
    """True with an implicit reward model."""
    is_scorer_trained: bool = False
    """True if that learns too."""

    @property
    def tokens(self) -> int:
        """Tokens of a forward over all rows."""
        return self.prompts * self.prompt_tokens + self.rows * self.sampled_tokens

    @property
    def forwards(self) -> int:
        """Forward-equivalents: a backward pass costs two, and one more where layers run again."""
        once = 4 if self.is_checkpointed else 3
        models = 2 if self.has_critic else 1
        measured = int(self.is_measured) + int(self.has_critic) + int(self.has_reference)
        # Its own logprobs and those of its reference; it sees each row once, whatever the epochs.
        scored = 2 * int(self.is_scored) + once * int(self.is_scorer_trained)
        return measured + models * self.epochs * once + scored


def learner_s(work: IterationWork, parameters: int, ranks: int, tflops: float) -> float:
    """Return the seconds of an iteration; 2 operations per parameter, token and forward."""
    return 2.0 * parameters * work.tokens * work.forwards / (tflops * 1e12 * ranks)


def engine_s(tokens: int, workers: int, tokens_per_s: float) -> float:
    """Return the seconds that `workers` engines take to write `tokens`."""
    return tokens / (workers * tokens_per_s)


def summed_rate(peak: float, steps: int, warmup_ratio: float, min_ratio: float) -> float:
    """Return the sum of the learning rate over a run's steps: warm-up, then the cosine.

    AdamW moves a weight by about the rate per step, so by no more than this in a whole run.
    """
    warmup = math.ceil(steps * warmup_ratio)
    falling = steps - warmup
    # Values of a cosine at evenly spaced steps, both ends among them, have the mean of the ends.
    mean = (1 + min_ratio) / 2 if falling > 1 else 1.0
    return peak * ((warmup + 1) / 2 * (warmup > 0) + falling * mean)
