"""One TOML per run, validated whole before anything heavy is imported; every daemon sees the same resolved tree.

The learner reads the file; workers receive the resolved config as JSON with their Welcome and override only what differs
per host (model path, device, engine). Relative paths are relative to the TOML's folder, `directory` to the working folder.
"""

import difflib
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator

from prefixrl.common.algorithm import AlgorithmConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.section import (
    FROM_RUN_FILE,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from prefixrl.common.vllm_options import VllmConfig


class ModelConfig(Section):
    model: str
    """Folder with a Hugging Face model, or a hub name."""


class DataConfig(Section):
    train: str
    """JSONL with the training problems, one object per line."""
    eval: str | None = None
    """JSONL with held-out problems."""
    epochs: Positive | None = None
    """Passes over the training problems; the last iteration may be small. Exclusive with `algorithm.iterations`."""
    id_column: str = "id"
    question_column: str = "question"
    answer_column: str = "answer"
    family_column: str | None = None
    """Column by which evaluation results are also broken down."""


class RolloutConfig(Section):
    engine: Literal["auto", "vllm", "transformers", "simulated"] = "auto"
    """auto: vLLM where it and a CUDA device are there, else transformers."""
    prefix_tokens: Positive = 32
    """k: the most tokens the adapter writes."""
    temperature: PositiveFloat = 0.7
    groups_per_task: Positive = 8
    """Groups sampled in one forward; part of what fixes the text."""
    max_prompt_tokens: Positive = 1024
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    """CPU threads of torch; more than one per process is slower on most machines."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference in a probe logprob at which installed weights count as proved; by default 1e-3 in fp32 and 0.2 in
    bf16, where learner and engine round differently (a wrong version differs by more than 1)."""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _draws_are_repeatable(self) -> "RolloutConfig":
        if not self.vllm.seeded:
            raise ValueError(
                "vllm.seeded = false is for scorers: a rollout's text follows from the run's seed, its group and its row"
            )
        return self


class ScorerConfig(Section):
    engine: Literal["auto", "vllm", "transformers", "simulated"] = "auto"
    """auto: vLLM where it and a CUDA device are there, else transformers."""
    max_new_tokens: Positive = 2048
    temperature: NonNegativeFloat = 0.7
    """0 completes greedily."""
    verifier_children: Positive = 1
    verify_timeout_s: Positive = 5
    max_prompt_tokens: Positive = 1024
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    keep_completions: bool = False
    """Keep the target's text in the journal."""
    vllm: VllmConfig = VllmConfig()


class SimulatedConfig(Section):
    """Declared latencies of the `simulated` engine: load tests and sizing, never evidence that training works."""

    prefix_s: NonNegativeFloat = 0.05
    completion_s: NonNegativeFloat = 0.2
    completion_sigma: NonNegativeFloat = 0.0
    """Spread of the lognormal completion time; 0 is constant."""
    accuracy: Fraction = 0.5


class LearnerConfig(Section):
    actor_lr: PositiveFloat = 5e-7
    critic_lr: PositiveFloat = 9e-6
    warmup_ratio: Fraction = 0.03
    min_lr_ratio: Fraction = 0.1
    """The cosine ends at this share of the peak."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one batch before the learner ends with the name of what it waited for."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Longest a rank waits inside a collective. No rank enters one before all hold their shard."""
    deepspeed: dict[str, Any] = Field(default_factory=lambda: {"zero_optimization": {"stage": 0}})
    """Passed to DeepSpeed as it stands."""


class BrokerConfig(Section):
    listen: str = "tcp://127.0.0.1:0"
    """Where workers connect; port 0 takes a free one and keeps it for the run directory."""
    heartbeat_s: PositiveFloat = 1.0
    silence_s: PositiveFloat = 10.0
    """A worker that says nothing for this long is given up and its leases go elsewhere."""
    stall_s: PositiveFloat = 600.0
    """A worker that holds leases and makes no progress for this long is given up although it still answers."""
    attempts: Positive = 3
    """Deaths one group may cause before its prompt is requeued as a new group."""
    requeues: NonNegative = 3
    """New groups one prompt may get before it fails."""

    @model_validator(mode="after")
    def _beats(self) -> "BrokerConfig":
        if self.silence_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"silence_s = {self.silence_s:g} must be at least three times heartbeat_s = {self.heartbeat_s:g}, "
                "or one late heartbeat ends a healthy worker"
            )
        return self


class CheckpointConfig(Section):
    every: NonNegative = 10
    """Iterations between checkpoints; 0 keeps only the last one of the run."""
    keep: Positive = 2


class EvaluationConfig(Section):
    max_new_tokens: Positive | None = None
    """Token limit of completions in evaluations; the scorer's when absent."""
    problems: Positive | None = None
    """At most this many held-out problems; all when absent."""
    fixed_prefixes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Candidate texts for the best fixed prefix, besides the most frequent sampled ones."""
    selection_problems: Positive = 128
    """Training problems on which the fixed prefix is chosen."""
    sampled_candidates: NonNegative = 4
    """How many of the most frequent prefixes of the untrained adapter are candidates too."""
    timeout_s: PositiveFloat = 3600.0


class LaunchConfig(Section):
    learner_ranks: Positive = 1
    rollouts: Positive = 1
    scorers: Positive = 1


class RunConfig(Section):
    """The whole run."""

    mode: Literal["prefix"] = "prefix"
    seed: NonNegative = 42
    directory: str
    """Where the run leaves everything; relative to the folder the command is started in."""
    adapter: ModelConfig
    target: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    scorer: ScorerConfig = ScorerConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    broker: BrokerConfig = BrokerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _length_of_run(self) -> "RunConfig":
        iterations, epochs = self.algorithm.iterations, self.data.epochs
        if (iterations is None) == (epochs is None):
            raise ValueError(
                f"algorithm.iterations = {iterations} and data.epochs = {epochs}: give exactly one, it ends the run"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_have_rows(self) -> "RunConfig":
        rows = self.algorithm.groups_per_iteration * self.algorithm.samples_per_prompt
        if self.algorithm.minibatches > rows:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} exceeds the {rows} rows of an iteration "
                f"(groups_per_iteration x samples_per_prompt)"
            )
        return self

    @property
    def probe_tolerance(self) -> float:
        """The tolerance in force."""
        default = 1e-3 if self.learner.dtype == "float32" else 0.2
        return self.rollout.probe_tolerance or default

    def groups_in_all(self, problems: int) -> int:
        """Groups a run over `problems` training problems trains when none fails."""
        if self.algorithm.iterations is not None:
            return self.algorithm.iterations * self.algorithm.groups_per_iteration
        assert self.data.epochs is not None
        return self.data.epochs * problems

    def iterations_in_all(self, problems: int) -> int:
        """Iterations of that run; the last one may be small."""
        return math.ceil(self.groups_in_all(problems) / self.algorithm.groups_per_iteration)


def load(path: str | Path, settings: tuple[str, ...] = ()) -> RunConfig:
    """Read and resolve a run file with `key.path=value` settings over it.

    Raises:
        ConfigError: naming the file, every wrong key, the value got and the values allowed.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the run file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        _apply(document, setting)
    config = _validate(document, str(path))
    return _resolve_paths(config, path.resolve().parent)


def from_json(text: str, where: str = "the broker's config") -> RunConfig:
    """A resolved config as it was written; raises ConfigError naming `where` when this release cannot read it."""
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        lines = [
            _explain(each["loc"], each["type"], each["msg"], each["input"])
            for each in error.errors()
        ]
        raise ConfigError(
            f"{where} cannot be read by this release (was it written by another one?)\n"
            + "\n".join(lines)
        ) from None


def _apply(document: dict[str, Any], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--set {setting!r} is not KEY=VALUE, for example --set algorithm.kl=1e-3"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted string: --set rollout.engine=transformers
    *sections, last = key.strip().split(".")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"--set {setting!r}: {section} is not a section of the run file")
    document[last] = value


def _validate(document: dict[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(document, context=FROM_RUN_FILE)
    except ValidationError as error:
        lines = [
            _explain(item["loc"], item["type"], item["msg"], item.get("input"))
            for item in error.errors()
        ]
        raise ConfigError(
            f"{where}: {len(lines)} problem{'s' if len(lines) > 1 else ''}\n" + "\n".join(lines)
        ) from None


def _explain(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(loc[-1]), _known_keys(loc[:-1]), n=1, cutoff=0.5)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known keys: {', '.join(_known_keys(loc[:-1]))}"
        )
        return f"  {key}: unknown key{hint}"
    if kind == "missing":
        return f"  {key}: missing"
    if kind == "value_error":
        return f"  {key + ': ' if key else ''}{message.removeprefix('Value error, ')}"
    return f"  {key} = {json.dumps(value, default=str)}: {message}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        candidates = get_args(annotation) if get_origin(annotation) else (annotation,)
        models = [
            item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)
        ]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)


def _resolve_paths(config: RunConfig, base: Path) -> RunConfig:
    """Absolute paths for everything that is there; hub names (org/name) stay as they are."""

    def model(section: str, name: str) -> str:
        local = base / os.path.expanduser(name)
        if local.exists():
            return str(local.resolve())
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise ConfigError(
                f"{section}.model = {name!r}: there is no such folder (looked at {local}) and it is no hub name (org/name)"
            )
        return name

    def file(key: str, name: str) -> str:
        local = (base / os.path.expanduser(name)).resolve()
        if not local.is_file():
            raise ConfigError(f"{key} = {name!r}: there is no such file (looked at {local})")
        return str(local)

    data = config.data.model_copy(
        update={
            "train": file("data.train", config.data.train),
            "eval": file("data.eval", config.data.eval) if config.data.eval else None,
        }
    )
    return config.model_copy(
        update={
            "directory": str(Path(os.path.expanduser(config.directory)).resolve()),
            "adapter": ModelConfig(model=model("adapter", config.adapter.model)),
            "target": ModelConfig(model=model("target", config.target.model)),
            "data": data,
        }
    )
