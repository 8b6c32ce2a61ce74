"""The sections of processes: engines and sampling, `[launch]` and the jobs of `[slurm]`.

A model's generation_config has no influence; penalties on repetition are not offered.
"""

import datetime
import math
import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from prefixrl.common.config import section as bounds
from prefixrl.common.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from prefixrl.common.config.step_rewards import ProcessModelConfig
from prefixrl.common.wire.messages.fields import MOST_ROWS
from prefixrl.common.wire.messages.groups import Sampling, TaskKind

_OF_MODEL = {
    "generation_config",
    "model",
    "override_generation_config",
    "skip_tokenizer_init",
    "tokenizer",
}
OWN_OPTIONS = _OF_MODEL | {"logprobs_mode", "scheduling_policy", "seed", "weight_transfer_config"}
"""Arguments of vLLM that this software sets itself."""


MOST_MASKED = 1024
"""The most tokens that vLLM's kernel on the GPU leaves out of a draw."""


class VllmConfig(Section):
    """Arguments of the vLLM engine. Absent ones have vLLM's own default unless stated here."""

    tensor_parallel_size: Positive = 1
    """Number of GPUs over which one model is spread."""
    quantization: str | None = None
    """Quantisation of a target, for example "fp8"; rollouts refuse it. Absent: the model folder's own."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and answer together. Absent: the longest row of this run, within the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: for a rollout the dtype of the published weights, for a scorer that of the checkpoint."""
    gpu_memory_utilization: bounds.Share | None = None
    """Share of the device's memory for weights and KV cache; lower it where processes share a GPU."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache. Absent: on a GPU the rest of `gpu_memory_utilization`, on a CPU 256 MiB."""
    max_num_seqs: Annotated[int, Field(gt=0, le=MOST_ROWS)] | None = None
    """Rows decoded at once, the engine's seats. Absent: vLLM's own choice for the device, 1024 on an 80 GB GPU."""
    attention_backend: str | None = None
    """Attention backend, for example "FLASH_ATTN"."""
    seeded: bool = True
    """Draw every row by its own seed: a repeated task gives the same text. Slower on a CPU; may be off for scorers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, passed unchanged."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine: tensor, pipeline and data parallel."""
        sizes = [self.options.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "data")]
        return math.prod([self.tensor_parallel_size, *sizes])

    def _check_sizes(self, info: ValidationInfo) -> None:
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            size = self.options.get(key, 1)
            if type(size) is not int or size < 1:
                raise ValueError(f"options.{key} = {size!r}: must be a whole number of at least 1")

    def changes_of_distribution(self) -> list[str]:
        """List the keys, with their values, that make it another policy than the weights."""
        changes = [f"quantization = {self.quantization!r}"] if self.quantization is not None else []
        cache = self.options.get("kv_cache_dtype", "auto")
        changes += (
            [f"options.kv_cache_dtype = {cache!r}"] if cache not in ("auto", "bfloat16") else []
        )
        return changes

    def _check_options(self, info: ValidationInfo) -> None:
        section_keys = sorted(set(self.options) & (set(type(self).model_fields) - {"options"}))
        if section_keys:
            raise ValueError(
                f"options sets {', '.join(section_keys)}: these are keys of this section itself"
            )
        own_options = sorted(set(self.options) & OWN_OPTIONS)
        if own_options:
            raise ValueError(
                f"options sets {', '.join(own_options)}: this software sets them itself; leave them out"
            )


_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def _problem(url: str) -> str:
    """Return the fault of an endpoint address as the end of a sentence, "" if it has none."""
    from httpx2 import URL, InvalidURL  # seldom needed, slow to import

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        URL(url)
    except (ValueError, InvalidURL) as error:
        return f": {error}"
    return "" if parts.scheme in ("http", "https") and host else "; scheme or host is missing"


class ServerConfig(Section):
    """A server that scorers ask over HTTP."""

    NAME: ClassVar[str]
    """The section's own name in the run file."""

    url: str | None = None
    key_variable: str | None = None
    """Name of the environment variable, on the scorers' hosts, that holds the key. Absent: no key is sent."""
    requests: Positive = 64
    request_s: PositiveFloat = 300.0
    patience_s: PositiveFloat = 600.0

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        problem = _problem(url)
        if set(url) & set("?#") or "@" in (url if problem else urlsplit(url).netloc):
            raise ValueError(
                "the address (not shown: addresses are logged) has a user, a password or a query; put the key into an "
                "environment variable and name that in key_variable"
            )
        if problem:
            raise ValueError(f"{url!r} is not an address like http://HOST:PORT/v1{problem}")
        return url.rstrip("/")

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError(
                "this (not shown: it may be the key itself) is not an environment variable's name like OPENAI_API_KEY"
            )
        return name


class OpenAIConfig(ServerConfig):
    """The options of `scorer.engine = "openai"`."""

    NAME = "scorer.openai"

    url: str | None = None
    """Address above `/completions`, for example "http://node7:8000/v1"."""
    model: str | None = None
    """Name of the target at the endpoint. Absent: the only model that the endpoint lists."""
    dialect: Literal["vllm", "openai"] = "vllm"
    """vllm: vLLM's extensions: token ids come back, stop tokens end a row, top_k, min_p. openai: OpenAI's keys only."""
    prompt: Literal["tokens", "text"] = "tokens"
    """tokens: the prompt is sent as ids. text: for endpoints without ids, which may read other tokens at the prefix."""
    requests: Positive = 64
    """Rows requested at once, per scorer."""
    request_s: PositiveFloat = 300.0
    """Limit of one request, then repeated. A row that misses it twice while others are answered gets no verdict."""
    patience_s: PositiveFloat = 600.0
    """Longest time without any answer; then the scorer ends. A row alone that fails for so long gets no verdict."""
    seeded: bool = True
    """Send each row's own seed, so that a repeated request gets the same text if the endpoint honours seeds."""
    prompt_price: NonNegativeFloat = 0.0
    """Price of a million prompt tokens, in any currency. No cost is reported while both prices are 0."""
    completion_price: NonNegativeFloat = 0.0
    """Price of a million completion tokens."""


LEAST_CACHE_BYTES = 2**20
TRUNCATIONS = ("top_k", "top_p", "min_p")
_ENGINE_KEYS = ("engine", "openai", "max_new_tokens", "temperature", "continuations", "cache_bytes")
_NEEDS_ENGINE = (("prefix",), "its scorers run no engine")


class EngineConfig(Section):
    """The options that a rollout's engine and a scorer's share."""

    max_prompt_tokens: Positive = 1024
    """Longest prompt, rendered; a longer one is no problem of the run and is named at its start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the transformers engine; auto is CUDA where there is one."""
    threads: Positive = 1
    """CPU threads of torch; more than one per process is slower on most machines."""
    vllm: VllmConfig = VllmConfig()
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

    def _check_stops(self, info: ValidationInfo) -> None:
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

    engine: Literal["auto", "vllm", "transformers", "simulated"] = "auto"
    """auto: vLLM where it is installed and there is a CUDA device, else transformers."""
    prefix_tokens: Positive = 32
    """k: most tokens the adapter writes in prefix mode."""
    answer_tokens: Positive = 2048
    """Most tokens the adapter writes in direct mode; an answer that does not end within them has reward 0."""
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

    def _check_draws(self, info: ValidationInfo) -> None:
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

    engine: Literal["auto", "vllm", "transformers", "openai", "simulated"] = "auto"
    """auto: vLLM where it is installed and there is a CUDA device, else transformers. openai: served elsewhere."""
    openai: OpenAIConfig = OpenAIConfig()
    max_new_tokens: Positive = 2048
    """Longest completion of the target."""
    temperature: NonNegativeFloat = 0.7
    """0 decodes greedily."""
    truncated: Literal["judge", "zero", "mask", "extend"] | None = None
    """Treatment of a completion that max_new_tokens cut. judge (default): it is judged as it is, so that an answer
    already given counts. zero (default in direct mode): reward 0. mask: the row is left out of training and counted; in
    evaluations it is judged as it is. extend: it is continued once by extension_tokens, then judged."""
    extension_tokens: Positive | None = None
    """Tokens added with truncated = "extend". Absent: max_new_tokens."""
    stop_texts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """A text is judged only up to the first of these: for base models, whose next invented problem begins so."""
    boxes: Literal["last", "sentence"] = "last"
    """Boxes that are the answer. last: the last one. sentence: for a gold answer that is a list, all those that "and",
    "or" or commas join to the last one."""
    verifier_children: Positive | None = None
    """Processes that judge answers, per scorer; each loads a reward function anew. Absent: one for 64 of its rows of an
    iteration, at most 4, and no more than its host has cores beside those of its engine (4; 1 without one)."""
    verify_timeout_s: Positive = 5
    """Longest time for one answer; then it is wrong, or with a user's function an error."""
    program_packages: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...], Field(strict=False)
    ] = ()
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

    def _check_endpoint(self, info: ValidationInfo) -> None:
        if self.engine != "openai":
            return
        self.refuse_if(
            self.openai.url is None,
            "engine openai.url",
            'give the address, for example "http://node7:8000/v1"',
        )
        extensions = [key for key in ("top_k", "min_p") if getattr(self, key)]
        self.refuse_if(
            extensions and self.openai.dialect == "openai",
            f"{' '.join(extensions)} openai.dialect",
            'OpenAI\'s API has no such key; leave it out, or use openai.dialect = "vllm" if vLLM '
            "serves it",
        )

    def _check_shares(self, info: ValidationInfo) -> None:
        target_share, prm = self.vllm.gpu_memory_utilization, self.prm
        is_one_device = prm is not None and prm.device != "cpu" and self.device != "cpu"
        if (
            target_share is None
            or prm is None
            or prm.engine != "vllm"
            or not is_one_device
            or target_share + prm.device_share <= 1
        ):
            return
        raise ValueError(
            f"vllm.gpu_memory_utilization = {target_share:g} with prm.gpu_memory_utilization = "
            f"{prm.device_share:g}: target and process reward model are on one GPU and would have "
            f"{target_share + prm.device_share:.2f} of its memory; lower one"
        )

    def _check_texts(self, info: ValidationInfo) -> None:
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


class SimulatedConfig(Section):
    """Declared latencies of the `simulated` engine, for load tests and sizing only."""

    ONLY_IN_MODE: ClassVar[bounds.OnlyWith] = dict.fromkeys(
        ("completion_s", "completion_sigma", "completion_limit_s", "accuracy"),
        (("prefix",), "its scorers run no engine"),
    )

    prefix_s: NonNegativeFloat = 0.05
    """Time of a job of prefixes."""
    completion_s: NonNegativeFloat = 0.2
    """Time of a job of completions."""
    completion_sigma: NonNegativeFloat = 0.0
    """Spread of the lognormal completion time of a row; 0 is constant."""
    completion_limit_s: PositiveFloat | None = None
    """Longest completion, as a length limit makes it. Absent: none."""
    accuracy: bounds.Fraction = 0.5
    """Share of completions with reward 1."""
    seats: Positive | None = None
    """Rows that an engine works on at once. Absent: those of four tasks."""


def _one_each(value: Any) -> Any:
    """Read `[0, 1]` as `[[0], [1]]`: a process with one GPU."""
    return (
        [[each] if isinstance(each, int) else each for each in value]
        if isinstance(value, list)
        else value
    )


Gpus = Annotated[tuple[NonNegative, ...], Field(strict=False)]
PerProcess = Annotated[tuple[Gpus, ...], BeforeValidator(_one_each), Field(strict=False)]


class DevicesConfig(Section):
    """GPUs of the processes on this machine, as numbers from 0; what is absent is dealt out."""

    learner: Gpus = ()
    """One per rank."""
    rollout: PerProcess = ()
    """Per rollout its GPUs: `[0, 1]` is one each, `[[0, 1]]` two for one."""
    scorer: PerProcess = ()
    """For each scorer the numbers of its GPUs."""


class LaunchConfig(Section):
    """Processes that `prefixrl launch` starts on this machine."""

    learner_ranks: Positive = 1
    """Ranks of the learner."""
    rollouts: Positive = 1
    """Rollouts that `prefixrl launch` starts."""
    scorers: Positive = 1
    """Scorers that `prefixrl launch` starts."""
    stop_s: PositiveFloat | None = None
    """Seconds for the learner to save after Ctrl-C. Absent: 60, and more for large checkpoints."""
    stall_s: PositiveFloat = 600.0
    """Time without any result, trained iteration or published version after which the console names who holds the run
    up. Longer than one iteration trains."""
    on_stall: Literal["warn", "end"] = "warn"
    """Effect of such a stall: only words, or the end of the launch with exit code 5."""
    devices: DevicesConfig = DevicesConfig()


SBATCH_OPTIONS = {
    "array", "cpus-per-task", "dependency", "error", "gpus-per-node", "gpus-per-task", "job-name", "mem", "mem-per-cpu",
    "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "no-requeue", "signal",
}  # fmt: skip
"""Options of sbatch that `prefixrl slurm` sets itself."""


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be one line of printable characters")
    return text


def _own_free(option: str) -> str:
    name = option.removeprefix("--").partition("=")[0].partition(" ")[0]
    if not option.startswith("--") or not name:
        raise ValueError('not a long option of sbatch such as "--qos=high"')
    if name in SBATCH_OPTIONS:
        raise ValueError(
            f"prefixrl slurm sets --{name} itself, from the other keys of [slurm] and from [launch]"
        )
    return option


Word = Annotated[str, Field(pattern=r"^[^\s'\"\\#]+$")]
Time = Annotated[
    str,
    # 12:00:00 is a time of day in TOML, and 90 a number.
    BeforeValidator(lambda value: str(value) if isinstance(value, int | datetime.time) else value),
    Field(pattern=r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d\d?(:\d\d){0,2})$"),
]
Lines = Annotated[tuple[Annotated[str, AfterValidator(_one_line)], ...], Field(strict=False)]
Options = Annotated[
    tuple[Annotated[str, AfterValidator(_own_free), AfterValidator(_one_line)], ...],
    Field(strict=False),
]


class SlurmRole(Section):
    """The resources of each process of one role."""

    partition: Word | None = None
    """Absent: `slurm.partition`."""
    time: Time | None = None
    """Absent: `slurm.time`."""
    cpus: Positive | None = None
    """CPU cores of each process. Absent: 8 for a learner rank, 4 for an engine, 1 where none is loaded; a scorer has
    `scorer.verifier_children` more."""
    memory_gib: NonNegative | None = None
    """Memory of each process. Absent: forecast from the models and devices; 0 asks for none, which is the site's
    default."""
    gpus: NonNegative | None = None
    """Absent: the GPUs over which the engine is spread, 1 for a learner rank, 0 where the device is cpu or no model is
    loaded."""
    gpu_type: Word | None = None
    """Name of the site for a kind of GPU, for example "h100". Absent: any."""
    sbatch: Options = ()
    """Further options of sbatch for the jobs of this role."""


class SlurmLearner(SlurmRole):
    """Resources of the learner's ranks."""

    nodes: Positive = 1
    """Nodes over which `launch.learner_ranks` are spread evenly."""


class SlurmConfig(Section):
    """Jobs of a run; how many processes there are is in `[launch]`."""

    account: Word | None = None
    """Account that the jobs are charged to."""
    partition: Word | None = None
    """Absent, like the account and the time: the site's default."""
    time: Time | None = None
    """Time limit in SLURM's format, for example "1-12:00:00". A job that reaches it saves and is queued again."""
    activate: Lines = ()
    """Shell lines that make `prefixrl-learner` and its kin available on a node, for example "module load cuda". Absent:
    the environment from which the jobs are submitted."""
    sbatch: Options = ()
    """Further options of sbatch for all jobs, for example "--qos=high"."""
    warn_s: Positive = 300
    """Time before the time limit at which a job is asked to save and leave."""
    restarts: NonNegative = 10
    """Restarts of a role that crashes, within one job."""
    learner: SlurmLearner = SlurmLearner()
    rollout: SlurmRole = SlurmRole()
    scorer: SlurmRole = SlurmRole()
