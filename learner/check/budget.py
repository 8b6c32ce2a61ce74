"""Memory of a config, beside what its devices have: lines, and refusals.

A process reward model lies on its scorer's first GPU: transformers takes what it needs, vLLM a share of the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.run import SPARE_COLUMNS, RunConfig
from prefixrl.common.config.workers.engines import ENGINES, TRANSFORMERS
from prefixrl.common.config.workers.sections import RolloutConfig, ScorerConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.hub import cached_file
from prefixrl.learner.check.footprint import (
    BUCKET,
    CONTEXT_BYTES,
    GIB,
    EngineFootprint,
    RankPlan,
    engine_footprint,
    learner_footprint,
    remedies,
)
from prefixrl.learner.check.model_shapes import parameters, shape_of, unknown_size
from prefixrl.learner.models.attention import shares_prompts
from prefixrl.learner.training.plan import Lengths, Plan, line_tokens, plan_iteration

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SETS = 2
"""Versions in the host's memory (`learner/weights/copies.py`)."""
WHOLE = 0.92
"""Share of a GPU that an engine counts on which takes what it needs."""
FREE = 0.02
"""Share of a GPU that is left free where several models are on it."""
HIDDEN_COPIES = 12
"""Hidden states that a layer holds at once without gradients: residual, norms, attention and the wide inner layer."""


def device_bytes(config: RunConfig) -> int | None:
    """Return a device's memory: declared, or of this host's first CUDA device; None without."""
    if config.learner.device_memory_gib is not None:
        return int(config.learner.device_memory_gib * GIB)
    if config.learner.device == "cpu":
        return None
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def check_fit(config: RunConfig, prompt_tokens: int) -> None:
    """Raise ConfigError if learner, rollout or scorer cannot fit the device's memory."""
    limit = device_bytes(config)
    if limit is None:
        return
    plan = rank_plan(config, prompt_tokens)
    faults = [learner_fault(plan, limit) if plan else "", process_fault(config, limit)]
    faults += [engine_fault(config, role, prompt_tokens, limit) for role in ("rollout", "scorer")]
    if any(faults):
        raise ConfigError("; and ".join(filter(None, faults)))


def planned(config: RunConfig, prompt_tokens: int) -> tuple[Plan, Lengths]:
    """Return the plan of a full iteration whose rows are all as long as they may be."""
    learner = config.learner
    algorithm = config.algorithm
    samples = algorithm.samples_per_prompt
    rows = algorithm.groups_per_iteration * samples
    lengths = [(prompt_tokens, config.max_sampled_tokens)] * rows
    device = "cpu" if learner.device == "cpu" else "cuda"
    plan = plan_iteration(
        lengths,
        [row // samples for row in range(rows)],
        0,
        config.launch.learner_ranks,
        algorithm.minibatches_of(rows),
        learner.micro_batch_tokens,
        shares_prompts(learner, device, config.mode == "direct"),
    )
    return plan, lengths


def rank_plan(config: RunConfig, prompt_tokens: int) -> RankPlan | None:
    """Return the settings that decide a rank's memory; None for an adapter of unknown size."""
    size = parameters(config.adapter.model)
    if size is None:
        return None
    learner = config.learner
    algorithm = config.algorithm
    sampled = config.max_sampled_tokens
    zero = learner.deepspeed.get("zero_optimization", {})
    plan, lengths = planned(config, prompt_tokens)
    shares = list(chain(*plan))
    micros = list(filter(None, chain(*shares)))
    widths = [max(line_tokens(line, lengths) for line in micro) for micro in micros]
    padded = [(width * len(micro), width) for width, micro in zip(widths, micros, strict=True)]
    padded_tokens, longest_tokens = max(padded, key=itemgetter(0))
    # Where a minibatch is one forward, the config's limit is more than there is.
    if any(len(share) > 1 for share in shares):
        padded_tokens = max(padded_tokens, learner.micro_batch_tokens)
    low_rank = None
    if learner.lora:
        low_rank = (learner.lora.rank, *_low_rank_parameters(config, learner.lora))
    stage = int(zero.get("stage", 0))
    reward = config.implicit_reward
    reward_parameters, reward_copies = _reward_model(config)
    return RankPlan(
        parameters=size[0],
        dtype_bytes=_DTYPE_BYTES[learner.dtype],
        stage=max(stage, 1) if learner.dtype == "bfloat16" else stage,
        ranks=config.launch.learner_ranks,
        micro_batch_tokens=padded_tokens,
        row_tokens=longest_tokens,
        action_positions=max(sum(map(len, micro)) for micro in micros) * sampled,
        shape=shape_of(config.adapter.model),
        has_critic=algorithm.has_critic,
        has_reference=algorithm.kl > 0,
        has_anchor=config.adapter.init_from is not None and config.adapter.reference == "model",
        has_average=learner.ema_decay is not None,
        low_rank=low_rank,
        is_checkpointed=learner.gradient_checkpointing,
        is_optimizer_offloaded=_is_offloaded(zero, "offload_optimizer"),
        are_weights_offloaded=_is_offloaded(zero, "offload_param"),
        bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        reward_parameters=reward_parameters,
        is_reward_trained=reward is not None and reward.update != "none",
        reward_copies=reward_copies,
    )


def _reward_model(config: RunConfig) -> tuple[int, int]:
    """Return an implicit reward model's parameters (if not known, the adapter's), and its frozen copies."""
    settings = config.implicit_reward
    if settings is None:
        return 0, 0
    models = filter(None, (settings.model, config.adapter.model))
    size = next(filter(None, map(parameters, models)), (0, ""))
    is_trained = settings.update != "none"
    is_frozen = settings.reference == "freeze"
    # Without its low-rank matrices the trained model is its own reference.
    is_own = is_trained and config.learner.lora is not None and settings.reference_model is None
    return size[0], int(not is_trained) + int(is_frozen and not is_own)


def _is_offloaded(zero: Mapping[str, object], key: str) -> bool:
    value = zero.get(key)
    return isinstance(value, dict) and value.get("device", "none") != "none"


def learner_lines(plan: RankPlan, limit: int | None) -> list[str]:
    """Return the table of one rank."""
    footprint = learner_footprint(plan)
    parts = {
        _states_text(plan): footprint.states,
        "activations"
        if plan.shape
        else "activations: not counted, the model's shape is not known": footprint.activations,
        "logits": footprint.logits,
        "buckets": footprint.buckets,
        "optimiser's temporaries (not at the same time)": footprint.optimizer,
    }
    device = "a device that is not here (learner.device_memory_gib)"
    if limit:
        device = f"{limit / GIB:.1f} GiB"
    sum_text = f"most at a time (buckets fill while activations go), with the device's own context, of {device}"
    head = f"learner, per rank of {plan.ranks}, ZeRO stage {plan.stage}:"
    rows = [
        f"  {size / GIB:8.2f} GiB  {text}"
        for text, size in [*parts.items(), (sum_text, footprint.peak)]
    ]
    copies = SETS * plan.parameters * plan.dtype_bytes
    offloaded = "what is offloaded, and " if footprint.host else ""
    # torch rounds each pinned buffer up to a power of two.
    host = f"  {(footprint.host + copies) / GIB:8.2f} GiB  of rank 0's host memory: {offloaded}two versions on their"
    return [head, *rows, f"{host} way to the disk (pinned, so up to twice their bytes)"]


def learner_fault(plan: RankPlan, limit: int) -> str:
    """Return the refusal of a learner that does not fit, with settings that do, or ""."""
    footprint = learner_footprint(plan)
    if footprint.peak <= limit:
        return ""
    fitting = _remedy_words(plan, limit)
    remedy = f"it would fit with {fitting}" if fitting else "no setting tried here makes it fit"
    return (
        f"a learner rank needs {footprint.peak / GIB:.1f} GiB and its device has {limit / GIB:.1f} "
        f"(learner.device_memory_gib; absent, this host's): {remedy}"
    )


def out_of_memory(config: RunConfig, prompt_tokens: int, limit: int, peak: int) -> str:
    """Return the words for a rank whose device had no room: forecast, most that was held, settings that take less."""
    plan = rank_plan(config, prompt_tokens)
    if plan is None:
        return f"at most {peak / GIB:.1f} GiB were held of {limit / GIB:.1f}; lower learner.micro_batch_tokens"
    forecast = learner_footprint(plan).peak
    less = _remedy_words(plan, int(0.9 * min(forecast, limit)))
    return (
        f"at most {peak / GIB:.1f} GiB were held of {limit / GIB:.1f}, the forecast is {forecast / GIB:.1f}; less is "
        f"needed with {less or 'a smaller adapter alone'}, or with the GPU for the learner alone"
    )


def _remedy_words(plan: RankPlan, limit: int) -> str:
    """Return the settings with which a rank fits, and its memory then; "" where none was found."""
    return "; or with ".join(
        f"{text} ({size / GIB:.1f} GiB)" for text, size in remedies(plan, limit)
    )


def _states_text(plan: RankPlan) -> str:
    models = len(plan.trained) - int(plan.is_reward_trained)
    if plan.low_rank is None:
        states = [f"{models} trained with optimiser", "reference" if plan.has_reference else ""]
    else:
        matrices = "low-rank matrices not counted without the adapter's config.json"
        if plan.low_rank[1]:
            matrices = f"{sum(plan.trained):,} low-rank and head parameters with optimiser"
        states = [f"{models} frozen", matrices]
    if plan.reward_parameters and plan.is_reward_trained:
        states.append("reward model")
    if plan.reward_parameters and plan.reward_copies:
        states.append(f"{plan.reward_copies} frozen of its size")
    if plan.has_average:
        states.append("moving average")
    return f"states ({', '.join(filter(None, states))})"


def _low_rank_parameters(config: RunConfig, settings: LoraConfig) -> tuple[int, int]:
    """Return the parameters of actor and critic beside frozen weights; 0 without a config.json."""
    path = cached_file(config.adapter.model, "config.json")
    if path is None:
        return 0, 0
    # Seconds of imports, which only a run with low-rank matrices pays for.
    from prefixrl.common.models.loading import without_weights
    from prefixrl.learner.models import lora

    model = without_weights(str(path.parent), f"adapter.model = {str(path.parent)!r}")
    lora.add(model, settings, 0)
    actor = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return actor, actor + int(model.config.get_text_config().hidden_size)


def engine(
    config: RunConfig, role: str, prompt_tokens: int, limit: int | None
) -> EngineFootprint | str:
    """Return an engine's bytes, or the sentence for one without."""
    process_words = "" if config.scorer.prm else " and needs no device"
    if role == "scorer" and config.target is None:
        return f"no target: a scorer loads the adapter's tokenizer{process_words}"
    if role == "scorer" and config.scorer.is_served:
        loads = "its tokenizer" if config.scorer.has_tokenizer else "nothing of it"
        return (
            f"target: served at {config.scorer.openai.url}; a scorer loads {loads}{process_words}"
        )
    section = config.engine_section(role)
    record = section.record
    if not record.holds_weights:
        return f"a {role}: {section.engine}, it loads no model"
    if record.memory is None and section.engine not in ENGINES:
        return f"a {role}: {section.engine}, whose package forecasts no memory"
    model = config.model_of("scorer" if role == "scorer" else "rollout")
    size = parameters(model)
    if size is None:
        return f"a {role}'s model: {unknown_size(model)}"
    row_tokens = prompt_tokens + config.max_sampled_tokens
    # A target stays in the type of its files; a rollout has that of the published weights.
    if role == "scorer":
        width = 2
        weights = _on_disk(model) or width * size[0]
        row_tokens += config.scorer.max_new_tokens
    else:
        width = _DTYPE_BYTES[config.learner.dtype]
        weights = width * size[0]
    # Embedded engines keep spare columns beside the tokens of a row; bitwise forwards have none.
    if record.memory and not config.bitwise:
        rows = record.memory.seats(section, limit)
    else:
        rows = config.embedded_seats(role)
        row_tokens += 0 if config.bitwise else int(SPARE_COLUMNS * row_tokens)
    shape = shape_of(model)
    token_cache = shape.cache_bytes(width) if shape else 0
    room = None
    if limit is not None and shape and section.device != "cpu":
        room = int(limit * _device_share(config, role, limit))
    return engine_footprint(weights, token_cache, row_tokens, rows, record.gpus(section), room)


def _on_disk(model: str) -> int:
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))


def _device_share(config: RunConfig, role: str, limit: int) -> float:
    section = config.engine_section(role)
    memory = section.record.memory
    beside = process_share(config, limit) if role == "scorer" else 0.0
    default_share = memory.default_share if memory else WHOLE
    free = max(0.0, 1.0 - FREE - beside) if beside else default_share
    return (memory.share(section) if memory else None) or free


def engine_lines(config: RunConfig, role: str, prompt_tokens: int, limit: int | None) -> list[str]:
    """Return the lines of a rollout or a scorer."""
    footprint = engine(config, role, prompt_tokens, limit)
    if isinstance(footprint, str):
        return [footprint]
    of_device = ""
    if limit is not None:
        of_device = f" of {_device_share(config, role, limit):.2f} x {limit / GIB:.1f} GiB"
    cache = "keys and values: not counted, since the model's shape is not known before it is on this host"
    if footprint.row_cache:
        cache = f"keys and values: {footprint.row_cache / 2**20:.1f} MiB per row of full length"
    if footprint.rows_in_room is not None:
        cache += f", room for {footprint.rows_in_room} of the {footprint.rows} rows at once"
    return [
        f"a {role}: {footprint.weights / GIB:.2f} GiB of weights{of_device}; {cache}",
        f"a {role}'s batch: {_batch(config, config.engine_section(role), role, footprint.rows)}",
    ]


def _batch(config: RunConfig, section: RolloutConfig | ScorerConfig, role: str, rows: int) -> str:
    """Return how the rows of an engine share its forwards, as far as it is known before it runs."""
    memory = section.record.memory
    if memory is not None and not section.is_automatic:
        return memory.batch_words(section, rows)
    if config.bitwise:
        whose = "by transformers, " if section.is_automatic else ""
        return f"{whose}the {rows} rows of a task are one forward, for texts that are the same bit by bit (bitwise)"
    either = f"by vLLM, where that is installed and a GPU is there, {rows} rows at once; else by transformers, "
    whose = either if section.is_automatic else ""
    rows = config.embedded_seats(role)
    return f"{whose}{rows} rows at once, which join and leave between tokens; bitwise = true would hold tasks together"


def engine_fault(config: RunConfig, role: str, prompt_tokens: int, limit: int) -> str:
    """Return the refusal of an engine that has no room for one row, or ""."""
    footprint = engine(config, role, prompt_tokens, limit)
    if isinstance(footprint, str) or footprint.rows_in_room != 0:
        return ""
    section = config.engine_section(role)
    memory = section.record.memory
    remedy = memory.remedy(section, role) if memory else "give it a smaller model"
    return (
        f"a {role}'s weights ({footprint.weights / GIB:.1f} GiB) leave no room for keys and values of one row in "
        f"{_device_share(config, role, limit):.2f} of {limit / GIB:.1f} GiB; {remedy}"
    )


@dataclass(frozen=True)
class ProcessFootprint:
    """Bytes of a process reward model on its device."""

    weights: int
    forward: int
    """Hidden states of the largest forward; 0 where the model's shape is not known."""
    text_cache: int
    """Keys and values of one text of `max_tokens`; 0 where none are kept."""
    context: int
    """0 where the target, in the same process, has a context already."""
    declared_share: float | None
    """vLLM's share of the device; None: what is needed."""

    @property
    def needed(self) -> int:
        """The least bytes with which it can score."""
        return self.weights + self.forward + self.text_cache + self.context

    def device_share(self, limit_bytes: int) -> float:
        """Return the share of its device that it takes."""
        return self.needed / limit_bytes if self.declared_share is None else self.declared_share


def process_footprint(config: RunConfig) -> ProcessFootprint | None:
    """Return the bytes; None without such a model, or where its size is not known."""
    prm = config.scorer.prm
    if prm is None or (size := parameters(prm.model)) is None:
        return None
    on_disk = _on_disk(prm.model) if prm.dtype == "auto" else 0
    # With dtype "auto" the files tell the bytes of a weight.
    width = on_disk / size[0] or _DTYPE_BYTES.get(prm.dtype, 2)
    shape = shape_of(prm.model)
    has_cache = prm.device_share is not None
    has_context = (
        config.target is not None
        and config.scorer.record is TRANSFORMERS
        and config.scorer.device != "cpu"
    )
    return ProcessFootprint(
        weights=on_disk or int(width * size[0]),
        forward=int(prm.batch_tokens * shape.hidden * width * HIDDEN_COPIES) if shape else 0,
        text_cache=int(shape.cache_bytes(1) * width * prm.max_tokens) if shape and has_cache else 0,
        context=0 if has_context and not has_cache else CONTEXT_BYTES,
        declared_share=prm.device_share,
    )


def _on_gpu(config: RunConfig) -> ProcessFootprint | None:
    prm = config.scorer.prm
    return process_footprint(config) if prm and prm.device != "cpu" else None


def process_share(config: RunConfig, limit: int) -> float:
    """Return the share of a scorer's first GPU for the model; 0 without one, or of unknown size."""
    footprint = _on_gpu(config)
    return footprint.device_share(limit) if footprint else 0.0


def process_lines(config: RunConfig, limit: int | None) -> list[str]:
    """Return the line of a scorer's process reward model; none without."""
    prm = config.scorer.prm
    footprint = process_footprint(config)
    if prm is None:
        return []
    if footprint is None:
        return [f"a scorer's process reward model: {unknown_size(prm.model)}"]
    text = f"{footprint.weights / GIB:.2f} GiB of weights"
    if footprint.forward:
        text += f", about {footprint.forward / GIB:.2f} GiB for a forward of {prm.batch_tokens:,} tokens"
    if prm.device == "cpu":
        return [f"a scorer's process reward model, on the CPU: {text}"]
    if footprint.text_cache:
        text += (
            f", {footprint.text_cache / 2**20:.1f} MiB of keys and values per text of full length"
        )
    if limit is not None:
        text += f"; {footprint.device_share(limit):.2f} of a GPU of {limit / GIB:.1f} GiB"
    has_target = config.target is not None and not config.scorer.is_served
    beside = ", beside its target" if has_target else ""
    return [f"a scorer's process reward model{beside}: {text}"]


def process_fault(config: RunConfig, limit: int) -> str:
    """Return the refusal of a model that its device or share is too small for, or ""."""
    footprint = _on_gpu(config)
    if footprint is None or footprint.needed <= int(limit * (footprint.declared_share or 1.0)):
        return ""
    where = f"{limit / GIB:.1f} GiB"
    remedy = "lower scorer.prm.batch_tokens, or name a smaller model"
    if footprint.declared_share is not None:
        where = f"{footprint.declared_share:.2f} of {where}"
        remedy = f"raise scorer.prm.gpu_memory_utilization, {remedy}"
    return (
        f"the process reward model needs {footprint.needed / GIB:.1f} GiB ({footprint.weights / GIB:.1f} of weights) "
        f"and has {where}; {remedy}"
    )
