"""The `[rollout]`, `[scorer]` and `[simulated]` sections: engines, and how they sample.

Nothing of a model's generation_config is taken over; penalties on repetition are not offered at all.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prefixrl.common.messages import Kind
from prefixrl.common.openai_options import OpenAIConfig
from prefixrl.common.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from prefixrl.common.vllm_options import VllmConfig

LEAST_CACHE_BYTES = 2**20
TRUNCATIONS = ("top_k", "top_p", "min_p")


class EngineConfig(Section):
    """What a rollout's engine and a scorer's have in common."""

    max_prompt_tokens: Positive = 1024
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    """CPU threads of torch; more than one per process is slower on most machines."""
    vllm: VllmConfig = VllmConfig()
    top_k: NonNegative = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the most likely tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only tokens at least this many times as likely as the most likely one."""

    def truncations(self) -> list[str]:
        """The keys by which tokens are left out of the draw, with their values."""
        fields = EngineConfig.model_fields
        return [
            f"{key} = {getattr(self, key):g}"
            for key in TRUNCATIONS
            if getattr(self, key) != fields[key].default
        ]


class RolloutConfig(EngineConfig):
    engine: Literal["auto", "vllm", "transformers", "simulated"] = "auto"
    """auto: vLLM where it and a CUDA device are there, else transformers."""
    prefix_tokens: Positive = 32
    """k: the most tokens the adapter writes in prefix mode."""
    answer_tokens: Positive = 2048
    """The most tokens it writes in direct mode; an answer that does not end within them has reward 0."""
    temperature: PositiveFloat = 0.7
    groups_per_task: Positive = 8
    """Groups sampled in one forward; part of what fixes the text."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference in a probe logprob at which installed weights count as proved; by default 1e-3 in fp32 and 0.2 in
    bf16, where learner and engine round differently (a wrong version differs by more than 1)."""
    allow_biased_ratios: bool = False
    """Accept top_p, top_k and min_p although they bias the correction."""
    swap: Literal["drain", "in_flight"] = "drain"
    """drain: new weights are installed once the last task is done, so that every answer is of one version. in_flight: running
    answers are paused and go on with the new weights; which version wrote which token is recorded. For long answers."""

    @model_validator(mode="after")
    def _ratios_are_unbiased(self) -> "RolloutConfig":
        given = self.truncations()
        if given and not self.allow_biased_ratios:
            raise ValueError(
                f"{', '.join(given)}: tokens are then drawn from a distribution that the learner does not have, so that "
                "p/mu of every one is off; leave it out, or ask for the bias by name with allow_biased_ratios = true"
            )
        return self

    @model_validator(mode="after")
    def _draws_are_repeatable(self) -> "RolloutConfig":
        if not self.vllm.seeded:
            raise ValueError(
                "vllm.seeded = false is for scorers: a rollout's text follows from the run's seed, its group and its row"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_swap(self) -> "RolloutConfig":
        transfer = self.vllm.options.get("kv_transfer_config")
        if self.swap == "in_flight" and transfer is not None:
            raise ValueError(
                f'swap = "in_flight" with vllm.options.kv_transfer_config = {transfer!r}: vLLM cannot forget keys and values '
                'that are under way to or from elsewhere; leave the transfer out, or use swap = "drain"'
            )
        return self


class ScorerConfig(EngineConfig):
    engine: Literal["auto", "vllm", "transformers", "openai", "simulated"] = "auto"
    """auto: vLLM where it and a CUDA device are there, else transformers. openai: the target is served elsewhere."""
    openai: OpenAIConfig = OpenAIConfig()
    max_new_tokens: Positive = 2048
    temperature: NonNegativeFloat = 0.7
    """0 completes greedily."""
    truncated: Literal["judge", "zero", "mask", "extend"] | None = None
    """What becomes of a completion that max_new_tokens cut. judge, the default: it is judged as it stands, so that an answer
    already given counts. zero, the default in direct mode: reward 0. mask: the row is left out of training and counted, in
    evaluations it is judged as it stands. extend: the completion goes on once for extension_tokens, then it is judged."""
    extension_tokens: Positive | None = None
    """With truncated = "extend"; by default as many as max_new_tokens."""
    verifier_children: Positive = 1
    verify_timeout_s: Positive = 5
    keep_completions: bool = False
    """Keep the target's text in the journal."""
    continuations: Positive = 1
    """m: in training every prefix is completed so many times, each with draws of its own, and its reward is the mean. In
    evaluations once."""
    cache_bytes: NonNegative = 0
    """So much of what it completed greedily each scorer keeps in memory, dropping what was longest out of use; 0: nothing. An
    answer from the cache was computed beside other rows than its own (docs/continuations.md)."""

    @model_validator(mode="after")
    def _endpoint_can_be_asked(self) -> "ScorerConfig":
        if self.engine != "openai":
            return self
        if self.openai.url is None:
            raise ValueError(
                'openai.url: missing, engine = "openai" needs the address of the endpoint, for example "http://node7:8000/v1"'
            )
        extensions = [each for each in self.truncations() if not each.startswith("top_p")]
        if extensions and self.openai.dialect == "openai":
            raise ValueError(
                f'{", ".join(extensions)} with openai.dialect = "openai": OpenAI\'s API has no such key; leave it out, or use '
                'openai.dialect = "vllm" where the endpoint is one'
            )
        return self

    @model_validator(mode="after")
    def _only_what_is_extended_has_an_extension(self) -> "ScorerConfig":
        if self.extension_tokens is not None and self.truncated != "extend":
            raise ValueError(
                f"extension_tokens = {self.extension_tokens} with truncated = {self.truncated!r}: only "
                'truncated = "extend" has an extension; leave it out, or ask for that'
            )
        return self

    @model_validator(mode="after")
    def _continuations_differ(self) -> "ScorerConfig":
        if self.continuations > 1 and self.temperature == 0:
            raise ValueError(
                f"continuations = {self.continuations} with temperature = 0: a greedy target writes the same every time; give "
                "temperature above 0, 0.7 say, or leave continuations out"
            )
        return self

    @model_validator(mode="after")
    def _cache_holds_something(self) -> "ScorerConfig":
        if 0 < self.cache_bytes < LEAST_CACHE_BYTES:
            raise ValueError(
                f"cache_bytes = {self.cache_bytes}: too little to be of use, the least is {LEAST_CACHE_BYTES} (1 MiB); raise "
                "it, or leave it out to keep nothing"
            )
        return self

    def texts_per_row(self, kind: Kind) -> int:
        """How many texts are judged per prefix, in direct mode per answer, of a task."""
        return self.continuations if kind == "train" else 1

    @property
    def most_extension_tokens(self) -> int:
        """Tokens that a cut completion may get on top of its limit."""
        if self.truncated != "extend":
            return 0
        return self.extension_tokens or self.max_new_tokens


class SimulatedConfig(Section):
    """Declared latencies of the `simulated` engine: load tests and sizing, never evidence that training works."""

    prefix_s: NonNegativeFloat = 0.05
    completion_s: NonNegativeFloat = 0.2
    completion_sigma: NonNegativeFloat = 0.0
    """Spread of the lognormal completion time; 0 is constant."""
    accuracy: Fraction = 0.5
