"""Figures that follow from a config alone: batch arithmetic, rows in flight, memory."""

import json
import math
import re
import struct
from fractions import Fraction
from pathlib import Path

from prefixrl.common.config.learner import LoraConfig
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.learner.data import problems

GIB = 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def forecast(config: RunConfig) -> str:
    """Return lines for a person; raise DataError for files, ConfigError for unfit matrices."""
    train, held_out = problems.read_all(config)
    count, algorithm = len(train.problems), config.algorithm
    rows = algorithm.groups_per_iteration * algorithm.samples_per_prompt
    iterations = config.iterations_in_all(count)
    window = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    cap = math.ceil(Fraction(str(config.filter.over_sampling)) * window)
    times, factor = config.scorer.continuations, config.filter.over_sampling
    over_sampled = f", {factor:g} times over for what the filter takes" if factor > 1 else ""
    lines = [
        f"{count} training problems; {config.groups_in_all(count)} groups in {iterations} iterations",
        f"an iteration: {algorithm.groups_per_iteration} groups x {algorithm.samples_per_prompt} rows = {rows} rows, "
        f"{algorithm.ppo_epochs} x {min(algorithm.minibatches, rows)} optimiser steps; {config.steps_in_all(count)} "
        f"in all",
        *([f"every prefix completed {times} times: {times * rows} completions"] if times > 1 else []),
        f"under way at once: at most {cap} groups = {cap * algorithm.samples_per_prompt} "
        f"{'prefixes' if config.mode == 'prefix' else 'answers'} of up to {config.max_sampled_tokens} tokens "
        f"(window of {algorithm.max_staleness} versions{over_sampled})",
    ]
    data = [*_data("train", train), *_data("eval", held_out)]
    return "\n".join([*data, *lines, *_adapter_memory(config), *_target_memory(config)])


def _data(kind: str, loaded: problems.Loaded) -> list[str]:
    """Return lines per source: counts of its rows, its first question, its first bad rows."""
    lines = []
    for report in loaded.sources:
        first = next(each for each in loaded.problems if each.source == report.label)
        lines.append(f"{kind}: {report}; the first: {first.question!r:.160} = {first.gold!r:.60}")
        lines += [f"  {row}" for row in report.bad[: problems.SHOWN_BAD_ROWS]]
    return lines


def parameters(model: str) -> tuple[int, str] | None:
    """Return the parameters of a model and their origin: file headers or a hub name (7B, 0.5B)."""
    total = sum(_tensor_sizes(path) for path in Path(model).glob("*.safetensors"))
    if total:
        return total, "from its files"
    named = re.search(r"(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", model.rsplit("/", 1)[-1])
    if named is None:
        return None
    return int(float(named.group(1)) * {"B": 1e9, "M": 1e6}[named.group(2)]), "from its name"


def _tensor_sizes(path: Path) -> int:
    with path.open("rb") as file:
        (size_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size_bytes))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _adapter_memory(config: RunConfig) -> list[str]:
    known = parameters(config.adapter.model)
    if known is None:
        return ["adapter: its size is not known before it is downloaded"]
    count, source = known
    working = _DTYPE_BYTES[config.learner.dtype]
    return [
        f"adapter: {count / 1e6:,.1f} M parameters ({source})",
        _learner_memory(config, count, working),
        f"a rollout: {count * working / GIB:.2f} GiB of weights, without its cache",
    ]


def _learner_memory(config: RunConfig, count: int, working: int) -> str:
    """Return the learner's line. `working`: bytes of a parameter while computing."""
    models = 2 if config.algorithm.has_critic else 1
    if config.learner.lora is None:
        actor = critic = count
        frozen = 1 if config.algorithm.kl > 0 else 0
        held = [f"{models} trained with optimiser", *(["reference"] if frozen else [])]
    else:
        actor, critic = _low_rank_parameters(config, config.learner.lora)
        frozen = models
        matrices = "low-rank matrices not counted before the adapter is downloaded"
        if actor:
            matrices = f"{actor + (models - 1) * critic:,} low-rank and head parameters with optimiser"
        held = [f"{models} frozen", matrices]
    trained = actor + (models - 1) * critic
    # Per trained parameter: working copy, fp32 master where that is not it, two Adam moments and a gradient in fp32.
    size_bytes = trained * (working + (4 if working == 2 else 0) + 8 + 4) + frozen * count * working
    if config.learner.ema_decay is not None:
        size_bytes += 4 * actor
        held.append("moving average")
    return f"learner: {size_bytes / GIB:.2f} GiB over all ranks without activations ({', '.join(held)})"


def _low_rank_parameters(config: RunConfig, settings: LoraConfig) -> tuple[int, int]:
    """Return the parameters of actor and critic beside frozen weights; 0 without model files."""
    if not Path(config.adapter.model, "config.json").is_file():
        return 0, 0
    # Seconds of imports, which only a run with low-rank matrices pays for.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prefixrl.learner.training import lora

    try:
        shape = AutoConfig.from_pretrained(config.adapter.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except (OSError, ValueError) as error:
        problem = f"is no model folder transformers can load: {error}"
        raise DataError(f"adapter.model = {config.adapter.model!r} {problem}") from error
    lora.add(model, settings, 0)
    actor = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return actor, actor + int(shape.get_text_config().hidden_size)


def _target_memory(config: RunConfig) -> list[str]:
    if config.target is None:
        return ["no target: a scorer loads the adapter's tokenizer and needs no device"]
    if config.scorer.engine == "openai":
        return [f"target: served at {config.scorer.openai.url}; a scorer loads its tokenizer and needs no device"]
    known = parameters(config.target.model)
    if known is None:
        return ["target: its size is not known before it is downloaded"]
    count, source = known
    on_disk = sum(path.stat().st_size for path in Path(config.target.model).glob("*.safetensors"))
    size_bytes = on_disk or 2 * count
    return [
        f"target: {count / 1e6:,.1f} M parameters ({source})",
        f"a scorer: {size_bytes / GIB:.2f} GiB of weights, without its cache",
    ]
