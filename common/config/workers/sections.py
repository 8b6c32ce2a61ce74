"""`[rollout]` and `[scorer]`: engines, sampling and judging.

A model's generation_config has no influence; penalties on repetition are not offered.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from prefixrl.common.config import section as bounds
from prefixrl.common.config.section import (
    Identifier,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Several,
)
from prefixrl.common.config.workers.engine_record import AUTO, EngineRecord
from prefixrl.common.config.workers.engines import (
    ENGINES,
    EngineOfRollouts,
    EngineOfScorers,
    engine_record,
)
from prefixrl.common.config.workers.process_model import NotEmpty, ProcessModelConfig
from prefixrl.common.config.workers.served import OPENAI, OpenAIConfig
from prefixrl.common.config.workers.vllm import VllmConfig
from prefixrl.common.wire.messages.groups import Sampling, TaskKind

LEAST_CACHE_BYTES = 2**20
TRUNCATIONS = ("top_k", "top_p", "min_p")
_ENGINE_KEYS = (
    "engine",
    "openai",
    "max_new_tokens",
    "temperature",
    "continuations",
    "cache_bytes",
    "stop_when_answered",
)
_NEEDS_ENGINE = (("prefix",), "its scorers run no engine")


class EngineConfig(Section):
    """The options that a rollout's engine and a scorer's share."""

    engine: str = AUTO
    """The engine."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, rendered; a longer one is no problem of the run and is named at its start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the transformers engine; auto is CUDA where there is one."""
    threads: Positive = 1
    """CPU threads of torch; more than one per process is slower on most machines."""
    vllm: VllmConfig = VllmConfig()
    engine_options: dict[str, Any] = Field(default={})
    """Options of an engine that has no keys of its own here, as those of installed packages."""
    stop_tokens: Annotated[tuple[int | str, ...], Field(strict=False)] = ()
    """Tokens that end a text besides the model's own stops, each as id or as text that is one token of the model."""
    own_stops: bool = True
    """The model's own stops end a text: every eos that tokenizer, config and generation config name, and the token that
    closes an assistant's turn in the chat template. false: those of stop_tokens alone."""
    top_k: NonNegative = 0
    """Draw only from the k most likely tokens; 0: from all."""
    top_p: bounds.Share = 1.0
    """Draw only from the most likely tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw only from tokens at least this many times as likely as the most likely one."""

    def _check_options(self) -> None:
        self.refuse_if(
            bool(self.engine_options) and not self.record.takes_options,
            "engine_options engine",
            "this engine takes none; leave them out",
        )

    @property
    def record(self) -> EngineRecord:
        """The record of the engine; of `auto` that of the one that a GPU host takes."""
        return engine_record(self.engine)

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts are made by the model's tokenizer."""
        return self.record.has_tokenizer

    @property
    def is_automatic(self) -> bool:
        """True if the worker's host decides on the engine."""
        return self.engine == AUTO

    def _check_stops(self) -> None:
        if not self.own_stops and not self.stop_tokens:
            raise ValueError(
                "own_stops = false without stop_tokens: no text would ever end; name tokens that "
                "end it"
            )

    def truncations(self) -> list[str]:
        """List the keys that leave tokens out of the draw, with their values."""
        fields = EngineConfig.model_fields
        return [
            f"{key} = {getattr(self, key):g}"
            for key in TRUNCATIONS
            if getattr(self, key) != fields[key].default
        ]

    def sampling(self, temperature: float, max_new_tokens: int) -> Sampling:
        """Return the settings of a draw."""
        truncation = {key: getattr(self, key) for key in TRUNCATIONS}
        return Sampling(temperature=temperature, max_new_tokens=max_new_tokens, **truncation)


class RolloutConfig(EngineConfig):
    """The adapter's engine, and how it samples."""

    ONLY_IN_MODE: ClassVar[bounds.OnlyWith] = {
        "prefix_tokens": (("prefix",), "the length of an answer is rollout.answer_tokens"),
        "answer_tokens": (("direct",), "the length of a prefix is rollout.prefix_tokens"),
    }

    engine: EngineOfRollouts = AUTO
    """auto: vLLM where it is installed and there is a CUDA device, else transformers. simulated: no model."""
    prefix_tokens: Positive = 32
    """k: most tokens the adapter writes in prefix mode."""
    answer_tokens: Positive = 2048
    """Most tokens the adapter writes in direct mode; `scorer.truncated` says what an answer is worth that does not end
    within them."""
    temperature: PositiveFloat = 0.7
    """Temperature of sampling; training knows it."""
    groups_per_task: Positive = 8
    """Groups of a task where its rows are one forward (`bitwise`); the sampled text depends on it. Else each group is a
    task, and a transformers engine decodes the rows of four times as many groups at once."""
    probe_tolerance: PositiveFloat | None = None
    """Difference of engine and learner that nine of ten logprobs of the probe may have where their change proves
    nothing, or three times that of the version before (docs/weights.md). Absent: 1e-3 in fp32, 0.2 in bf16."""
    allow_biased_ratios: bool = False
    """Accept top_p, top_k and min_p although they bias the correction."""
    control_tokens: Literal["mask", "allow"] = "mask"
    """Special tokens of the adapter's tokenizer that are no stop, such as the opening of a user's turn. mask: they are
    never drawn, and have probability 0 on either side of every ratio. allow: they are drawn like any other token, and
    control_tokens_fraction counts the rows that hold one."""
    swap: Literal["drain", "in_flight"] = "drain"
    """drain: new weights are installed after the last task is done, so every answer has one version. in_flight: running
    answers pause and continue with the new weights, and the version of every token is recorded; for long answers."""

    def _check_draws(self) -> None:
        truncations = self.truncations()
        if truncations and not self.allow_biased_ratios:
            raise ValueError(
                f"{', '.join(truncations)}: tokens would be drawn from another distribution than "
                f"the learner's, which biases p/mu of every token; leave it out, or accept that "
                f"with allow_biased_ratios = true"
            )
        self.refuse_if(
            not self.vllm.seeded,
            "vllm.seeded",
            "for scorers alone: a rollout's text follows from seed, group and row; leave it out",
        )
        changes = self.vllm.changes_of_distribution()
        if changes:
            raise ValueError(
                f"{', '.join(f'vllm.{key}' for key in changes)}: a rollout would sample from "
                f"another policy than the published weights are, and could not be given new ones; "
                f"leave it out (scorers may have it)"
            )
        if "speculative_config" in self.vllm.options:
            raise ValueError(
                "vllm.options.speculative_config is for scorers: a draft model would stay behind "
                "while a rollout's weights change, and accepted drafts have other logprobs; leave "
                "it out"
            )
        transfer = self.vllm.options.get("kv_transfer_config")
        if self.swap == "in_flight" and transfer is not None:
            raise ValueError(
                f'swap = "in_flight" with vllm.options.kv_transfer_config = {transfer!r}: vLLM '
                f"cannot drop keys and values that are being transferred; leave the transfer out, "
                f'or use swap = "drain"'
            )


class ScorerConfig(EngineConfig):
    """The target's engine, how it completes, and how answers are judged."""

    ONLY_IN_MODE: ClassVar[bounds.OnlyWith] = dict.fromkeys(
        (*EngineConfig.model_fields, *_ENGINE_KEYS), _NEEDS_ENGINE
    )

    engine: EngineOfScorers = AUTO
    """auto: vLLM where it is installed and there is a CUDA device, else transformers. openai: served elsewhere.
    simulated: no model."""
    openai: OpenAIConfig = OpenAIConfig()
    max_new_tokens: Positive = 2048
    """Longest completion of the target."""
    temperature: NonNegativeFloat = 0.7
    """0 decodes greedily."""
    truncated: Literal["judge", "zero", "mask", "extend"] | None = None
    """Treatment of a completion that max_new_tokens cut. judge (default): it is judged as it is, so that an answer
    already given counts. zero: reward 0; the default in direct mode, where a reward.function with a parameter `finish`
    judges cut answers, too. mask: the row is left out of training and counted; in
    evaluations it is judged as it is. extend: it is continued once by extension_tokens, then judged."""
    extension_tokens: Positive | None = None
    """Tokens added with truncated = "extend". Absent: max_new_tokens."""
    stop_texts: Several[NotEmpty] = ()
    """A text is judged only up to the first of these: for base models, whose next invented problem begins so."""
    stop_when_answered: bool = False
    """End a completion as soon as its final answer is complete: with the paragraph of a closed box, behind any thought
    (docs/targets.md). Evaluations and drafts do so too."""
    boxes: Literal["last", "sentence"] = "last"
    """Boxes that are the answer. last: the last one. sentence: for a gold answer that is a list, all those that "and",
    "or" or commas join to the last one."""
    verifier_children: Positive | None = None
    """Processes that judge answers, per scorer; each loads a reward function anew. Absent: one for 64 of its rows of an
    iteration, at most 4, and no more than its host has cores beside those of its engine (4; 1 without one)."""
    verify_timeout_s: Positive = 5
    """Longest time for one answer; then it is wrong, or with a user's function an error."""
    program_packages: Several[Identifier] = ()
    """Packages that programs of `data.code` may import beside the standard library, installed where scorers run:
    ["numpy"]."""
    keep_completions: bool = False
    """Keep the target's text in the journal."""
    continuations: Positive = 1
    """m: completions of every prefix in training, each with draws of its own; the reward is their mean."""
    cache_bytes: NonNegative = 0
    """Memory of each scorer for greedy completions, least recently used dropped first; 0: no cache. A completion from
    the cache was computed beside other rows than its own (docs/continuations.md)."""
    prm: ProcessModelConfig | None = None
    """Absent: no process reward model; the reward is the verdict."""

    @property
    def is_served(self) -> bool:
        """True for a target behind an endpoint."""
        return self.record is OPENAI

    @property
    def is_chat(self) -> bool:
        """True for a target that is asked in messages, whose files are not needed."""
        return self.is_served and self.openai.is_chat

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts are made by the target's tokenizer."""
        return self.record.has_tokenizer and not self.is_chat

    def _check_chat(self) -> None:
        if not self.is_chat:
            return
        self.refuse_if(
            self.truncated == "extend",
            "truncated openai.api",
            "a chat endpoint begins every answer anew; raise max_new_tokens, or use judge, zero or mask",
        )
        condition, reason = 'openai.api = "chat"', "the endpoint makes the prompt from messages"
        self.refuse_given(("stop_tokens", "own_stops"), condition, reason)
        if self.openai.is_given("prompt"):
            raise ValueError(f"openai.{self.openai.no_effect('prompt', condition, reason)}")

    def _check_endpoint(self) -> None:
        if not self.is_served:
            return
        self.refuse_if(
            self.openai.url is None,
            "engine openai.url",
            'give the address, for example "http://node7:8000/v1"',
        )
        extensions = [key for key in ("top_k", "min_p") if getattr(self, key)]
        self.refuse_if(
            extensions and not self.openai.has_extensions,
            f"{' '.join(extensions)} openai.dialect",
            'OpenAI\'s API has no such key; leave it out, or use openai.dialect = "vllm" if vLLM '
            "serves it",
        )

    def _check_shares(self) -> None:
        target_share = self.vllm.gpu_memory_utilization
        prm = self.prm
        is_one_device = prm is not None and prm.device != "cpu" and self.device != "cpu"
        if (
            target_share is None
            or prm is None
            or prm.device_share is None
            or not is_one_device
            or target_share + prm.device_share <= 1
        ):
            return
        raise ValueError(
            f"vllm.gpu_memory_utilization = {target_share:g} with prm.gpu_memory_utilization = "
            f"{prm.device_share:g}: target and process reward model are on one GPU and would have "
            f"{target_share + prm.device_share:.2f} of its memory; lower one"
        )

    def _check_stopping(self) -> None:
        self.check_stopping(self.engine)
        self.refuse_if(
            self.stop_when_answered and self.prm is not None,
            "stop_when_answered prm.model",
            "steps behind the answer would have no scores; leave one of them out",
        )

    def check_stopping(self, engine: str) -> None:
        """Raise ValueError if an engine cannot end a completion where `stop_when_answered` wants it to end."""
        if self.stop_when_answered and not engine_record(engine).ends_watched_rows:
            able = [name for name, record in ENGINES.items() if record.ends_watched_rows]
            raise ValueError(
                f"stop_when_answered = true with engine = {engine!r}: it writes a completion to its end, whatever "
                f"the text says; leave stop_when_answered out, or use {' or '.join(able)}"
            )

    def _check_texts(self) -> None:
        self.refuse_if(
            self.extension_tokens is not None and self.truncated != "extend",
            "extension_tokens truncated",
            'only truncated = "extend" has an extension; leave it out, or use that',
        )
        self.refuse_if(
            self.continuations > 1 and self.temperature == 0,
            "continuations temperature",
            "a greedy target writes the same text every time; raise temperature, or leave "
            "continuations out",
        )
        self.refuse_if(
            0 < self.cache_bytes < LEAST_CACHE_BYTES,
            "cache_bytes",
            f"the least useful size is {LEAST_CACHE_BYTES} (1 MiB); 0 is no cache",
        )

    def texts_per_row(self, kind: TaskKind) -> int:
        """Return the number of texts judged per row of a task."""
        return self.continuations if kind == "train" else 1

    @property
    def most_extension_tokens(self) -> int:
        """The tokens that a cut completion may get beyond its limit."""
        return (self.extension_tokens or self.max_new_tokens) if self.truncated == "extend" else 0
