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

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from prefixrl.common import user_function
from prefixrl.common.algorithm import AlgorithmConfig
from prefixrl.common.data_section import DataConfig, resolve
from prefixrl.common.errors import ConfigError
from prefixrl.common.filtering import FilterConfig
from prefixrl.common.learner_section import LearnerConfig
from prefixrl.common.messages import Sampling
from prefixrl.common.mode import Mode, without_meaning
from prefixrl.common.section import (
    FROM_RUN_FILE,
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
)
from prefixrl.common.worker_sections import (
    EngineConfig,
    RolloutConfig,
    ScorerConfig,
    SimulatedConfig,
)

SAMPLED_TOKEN_BYTES = 8
"""An id and a logprob."""
VERDICT_BYTES = 1024
"""A verdict on one of several continuations, with a long answer."""
MOST_TASK_BYTES = 48 * 2**20
"""Well below what one message may hold, with room for prompts and texts."""


class ModelConfig(Section):
    model: str
    """Folder with a Hugging Face model, or a hub name."""


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
    max_failure_share: Fraction = 0.5
    """When more of the newest rows than this could not be sampled or judged, the run ends with the causes; 1 never ends it."""

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
    every: NonNegative = 0
    """Versions between evaluations of the adapter in training, greedy, on the held-out problems; 0: only before and after."""
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
    """Longest wait after training: for the candidates, then for the arms; what is late is named, and nothing else with it."""


class RewardConfig(Section):
    function: str | None = None
    """`file.py:name` of a function (question, answer text, gold) -> reward in [0, 1], called instead of the verifier."""


class LaunchConfig(Section):
    learner_ranks: Positive = 1
    rollouts: Positive = 1
    scorers: Positive = 1


class RunConfig(Section):
    """The whole run."""

    mode: Mode = "prefix"
    """prefix: the adapter begins the answer and a frozen target completes it. direct: the adapter writes the whole answer."""
    seed: NonNegative = 42
    directory: str
    """Where the run leaves everything; relative to the folder the command is started in."""
    adapter: ModelConfig
    target: ModelConfig | None = None
    """The frozen model; required in prefix mode, refused in direct mode."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    scorer: ScorerConfig = ScorerConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    filter: FilterConfig = FilterConfig()
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
    def _keys_of_the_mode(self, info: ValidationInfo) -> "RunConfig":
        if self.mode == "prefix" and self.target is None:
            raise ValueError(
                'target: missing, with mode = "prefix" a frozen target completes the answers; give [target] model, or use '
                'mode = "direct"'
            )
        if self.mode == "direct" and self.target is not None:
            raise ValueError(
                f'target.model = {self.target.model!r} with mode = "direct": the adapter writes the whole answer; leave '
                '[target] out, or use mode = "prefix"'
            )
        if self.mode == "direct" and self.scorer.truncated == "extend":
            raise ValueError(
                'scorer.truncated = "extend" with mode = "direct": scorers run no engine that could go on; raise '
                "rollout.answer_tokens, or use judge, zero or mask"
            )
        if useless := without_meaning(self.mode, dict(self), bool(info.context)):
            raise ValueError("\n  ".join(useless))
        return self

    @model_validator(mode="after")
    def _one_judge(self) -> "RunConfig":
        if self.reward.function is not None and self.data.code != "none":
            raise ValueError(
                f"reward.function = {self.reward.function!r} with data.code = {self.data.code!r}: the function judges every "
                "answer, so that no program would be run; leave one of them out"
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

    @model_validator(mode="after")
    def _some_group_can_pass(self) -> "RunConfig":
        if self.reward.function is None:  # else rewards are fractions, and so are means
            rows = self.algorithm.samples_per_prompt
            self.filter.check_reachable(rows, self.scorer.continuations)
        return self

    @model_validator(mode="after")
    def _the_broker_gives_up_first(self) -> "RunConfig":
        patience_s, stall_s = self.learner.batch_timeout_s, self.broker.stall_s
        if patience_s <= max(stall_s, self.broker.silence_s):
            raise ValueError(
                f"learner.batch_timeout_s = {patience_s:g} with broker.stall_s = {stall_s:g} and broker.silence_s = "
                f"{self.broker.silence_s:g}: the learner would end before a stuck worker's groups are given to another; "
                "batch_timeout_s must exceed both"
            )
        return self

    @model_validator(mode="after")
    def _the_endpoint_is_waited_for(self) -> "RunConfig":
        if self.scorer.engine != "openai":
            return self
        request_s, patience_s = self.scorer.openai.request_s, self.scorer.openai.patience_s
        if request_s >= self.broker.stall_s:
            raise ValueError(
                f"scorer.openai.request_s = {request_s:g} with broker.stall_s = {self.broker.stall_s:g}: a scorer would be "
                "given up before its request is; request_s must be the shorter one"
            )
        if patience_s >= self.learner.batch_timeout_s:
            raise ValueError(
                f"scorer.openai.patience_s = {patience_s:g} with learner.batch_timeout_s = "
                f"{self.learner.batch_timeout_s:g}: the learner would end before the scorers do that wait for the endpoint; "
                "batch_timeout_s must exceed it"
            )
        return self

    @model_validator(mode="after")
    def _a_task_fits_a_message(self) -> "RunConfig":
        rows, times = self.rollout.groups_per_task * self.algorithm.samples_per_prompt, ""
        row_bytes = self.max_sampled_tokens * SAMPLED_TOKEN_BYTES
        if self.scorer.continuations > 1:
            row_bytes += self.scorer.continuations * VERDICT_BYTES
            times = f", scorer.continuations = {self.scorer.continuations}"
        size_bytes = rows * row_bytes
        if size_bytes > MOST_TASK_BYTES:
            length = "prefix_tokens" if self.mode == "prefix" else "answer_tokens"
            raise ValueError(
                f"rollout.groups_per_task = {self.rollout.groups_per_task} with algorithm.samples_per_prompt = "
                f"{self.algorithm.samples_per_prompt}{times} and rollout.{length} = {self.max_sampled_tokens}: one task's "
                f"result may have {size_bytes / 2**20:.0f} MiB, allowed are {MOST_TASK_BYTES / 2**20:.0f}; lower "
                "rollout.groups_per_task"
            )
        return self

    @property
    def probe_tolerance(self) -> float:
        """The tolerance in force."""
        default = 1e-3 if self.learner.dtype == "float32" else 0.2
        return self.rollout.probe_tolerance or default

    @property
    def max_sampled_tokens(self) -> int:
        """The most tokens the adapter writes: a prefix, or in direct mode an answer."""
        return self.rollout.prefix_tokens if self.mode == "prefix" else self.rollout.answer_tokens

    def rollout_sampling(self, heat: float = 1.0) -> Sampling:
        """How the adapter draws its tokens; `heat` 0 decodes greedily, 1 at the run's own temperature."""
        return _sampling(self.rollout, heat, self.rollout.temperature, self.max_sampled_tokens)

    def scorer_sampling(self, heat: float = 1.0) -> Sampling:
        """How the target draws its tokens; `heat` as above."""
        return _sampling(self.scorer, heat, self.scorer.temperature, self.scorer.max_new_tokens)

    def rows_per_job(self, role: str) -> int:
        """Rows that an engine of this role is given at once."""
        rows = self.rollout.groups_per_task * self.algorithm.samples_per_prompt
        return rows * self.scorer.continuations if role == "scorer" else rows

    def model_of(self, role: Literal["rollout", "scorer"]) -> str:
        """What a worker loads; in direct mode a scorer reads nothing but the tokenizer of it."""
        if role == "rollout" or self.target is None:
            return self.adapter.model
        return self.target.model

    def groups_in_all(self, problems: int) -> int:
        """Groups a run over `problems` training problems trains when none fails and no filter takes any."""
        if self.algorithm.iterations is not None:
            return self.algorithm.iterations * self.algorithm.groups_per_iteration
        assert self.data.epochs is not None
        return self.data.epochs * problems

    def iterations_in_all(self, problems: int) -> int:
        """Iterations of that run; the last one may be small. With `data.epochs` and a filter there may be fewer."""
        return math.ceil(self.groups_in_all(problems) / self.algorithm.groups_per_iteration)


def _sampling(section: EngineConfig, heat: float, temperature: float, max_tokens: int) -> Sampling:
    return Sampling(heat * temperature, max_tokens, section.top_k, section.top_p, section.min_p)


def load(path: str | Path, settings: tuple[str, ...] = ()) -> RunConfig:
    """Read and resolve a run file with `key.path=value` settings over it; nothing that it names is executed.

    Raises:
        ConfigError: naming the file, every wrong key, the value got and the values allowed.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the run file, a TOML, that describes the run")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the run file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        _apply(document, setting)
    return _resolve_paths(_validate(document, str(path)), path.resolve().parent)


def from_flags(document: dict[str, Any], settings: tuple[str, ...]) -> RunConfig:
    """As `load`, of a command line that names everything; paths are relative to the working folder."""
    for setting in settings:
        _apply(document, setting)
    return _resolve_paths(_validate(document, "the command line"), Path.cwd())


def import_functions(config: RunConfig) -> None:
    """Execute the files of the user's functions, so that a mistake in them is told before anything is started.

    Raises:
        ConfigError: naming the key, when the file does not run or the name is no function.
    """
    places = {
        "reward.function": config.reward.function,
        "algorithm.advantage_function": config.algorithm.advantage_function,
    }
    for key, place in places.items():
        try:
            if place is not None:
                user_function.load(place)
        except ConfigError as error:
            raise ConfigError(f"{key} = {place!r}: {error}") from None


def changed(config: RunConfig, settings: tuple[str, ...], where: str) -> RunConfig:
    """A resolved config with `key.path=value` settings over it; raises ConfigError naming every wrong key."""
    document = config.model_dump(mode="json")
    for setting in settings:
        _apply(document, setting)
    try:
        return RunConfig.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explained(error)}") from None


def from_json(text: str, where: str = "the broker's config") -> RunConfig:
    """A resolved config as it was written; raises ConfigError naming `where` when this release cannot read it."""
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{where} cannot be read by this release (was it written by another one?): {_explained(error)}"
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
        raise ConfigError(f"{where}: {_explained(error)}") from None


def _explained(error: ValidationError) -> str:
    lines = [
        _explain(each["loc"], each["type"], each["msg"], each.get("input"))
        for each in error.errors()
    ]
    return f"{len(lines)} problem{'s' if len(lines) > 1 else ''}\n" + "\n".join(lines)


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
        if isinstance(part, int):
            continue  # a place in a list
        if part not in model.model_fields:
            return []
        annotation = model.model_fields[part].annotation
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

    def function(key: str, place: str | None) -> str | None:
        return None if place is None else user_function.resolve(key, place, base)

    return config.model_copy(
        update={
            "directory": str(Path(os.path.expanduser(config.directory)).resolve()),
            "adapter": ModelConfig(model=model("adapter", config.adapter.model)),
            "target": config.target and ModelConfig(model=model("target", config.target.model)),
            "data": resolve(config.data, base),
            "reward": RewardConfig(function=function("reward.function", config.reward.function)),
            "algorithm": config.algorithm.model_copy(
                update={
                    "advantage_function": function(
                        "algorithm.advantage_function", config.algorithm.advantage_function
                    )
                }
            ),
        }
    )
