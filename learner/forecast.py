"""What follows from a config before anything is started: batch arithmetic, how much is under way at once, memory."""

import json
import math
import re
import struct
from fractions import Fraction
from pathlib import Path

from prefixrl.common.config import RunConfig
from prefixrl.common.errors import DataError
from prefixrl.common.learner_section import LoraConfig
from prefixrl.learner import problems
from prefixrl.learner.shard import steps_in_all

GIB = 2**30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def forecast(config: RunConfig) -> str:
    """Lines for a person.

    Raises:
        ConfigError: low-rank matrices that fit no layer of the adapter.
        DataError: the training data or the adapter's config.json cannot be read.
    """
    train, held_out = problems.read_all(config)
    count = len(train.problems)
    algorithm = config.algorithm
    rows = algorithm.groups_per_iteration * algorithm.samples_per_prompt
    iterations = config.iterations_in_all(count)
    window = algorithm.groups_per_iteration * (algorithm.max_staleness + 1)
    cap = math.ceil(Fraction(str(config.filter.over_sampling)) * window)
    lines = [
        f"{count} training problems; {config.groups_in_all(count)} groups in {iterations} iterations",
        f"an iteration: {algorithm.groups_per_iteration} groups x {algorithm.samples_per_prompt} rows = {rows} rows, "
        f"{algorithm.ppo_epochs} x {min(algorithm.minibatches, rows)} optimiser steps; {steps_in_all(config, count)} in all",
        *_continuations(config, rows),
        f"under way at once: at most {cap} groups = {cap * algorithm.samples_per_prompt} "
        f"{'prefixes' if config.mode == 'prefix' else 'answers'} of up to {config.max_sampled_tokens} tokens "
        f"(window of {algorithm.max_staleness} versions{_over_sampled(config)})",
    ]
    said = [*_data("train", train), *_data("eval", held_out)]
    return "\n".join([*said, *lines, *_adapter_memory(config), *_target_memory(config)])


def _data(kind: str, loaded: problems.Loaded) -> list[str]:
    """Per source what became of its rows, its first question, its first bad rows."""
    lines = []
    for report in loaded.sources:
        first = next(each for each in loaded.problems if each.source == report.label)
        lines.append(f"{kind}: {report}; the first: {first.question!r:.160} = {first.gold!r:.60}")
        lines += [f"  {row}" for row in report.bad[: problems.SHOWN_BAD_ROWS]]
    return lines


def _continuations(config: RunConfig, rows: int) -> list[str]:
    times = config.scorer.continuations
    return (
        [f"every prefix completed {times} times: {times * rows} completions"] if times > 1 else []
    )


def _over_sampled(config: RunConfig) -> str:
    f = config.filter.over_sampling
    return f", {f:g} times over for what the filter takes" if f > 1 else ""


def parameters(model: str) -> tuple[int, str] | None:
    """Parameters of a model and how they are known: from its files' headers, or from the size in a hub name (7B, 0.5B)."""
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
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )


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
    """`count`: the adapter's parameters; `working`: bytes of one in the dtype it is computed in."""
    models = 2 if config.algorithm.has_critic else 1
    if config.learner.lora is None:
        actor = critic = count
        frozen = 1 if config.algorithm.kl > 0 else 0
        held = [f"{models} trained with optimiser", *(["reference"] if frozen else [])]
    else:
        actor, critic = _low_rank_parameters(config, config.learner.lora)
        frozen = models
        held = [f"{models} frozen", _said_of_low_rank(actor + (models - 1) * critic)]
    trained = actor + (models - 1) * critic
    # Per trained parameter: working copy, fp32 master where that is not it, two Adam moments and a gradient in fp32.
    size_bytes = trained * (working + (4 if working == 2 else 0) + 8 + 4) + frozen * count * working
    if config.learner.ema_decay is not None:
        size_bytes += 4 * actor
        held.append("moving average")
    return f"learner: {size_bytes / GIB:.2f} GiB over all ranks without activations ({', '.join(held)})"


def _said_of_low_rank(count: int) -> str:
    if count == 0:
        return "low-rank matrices not counted before the adapter is downloaded"
    return f"{count:,} low-rank and head parameters with optimiser"


def _low_rank_parameters(config: RunConfig, settings: LoraConfig) -> tuple[int, int]:
    """What actor and critic train beside frozen weights, counted on the adapter without its weights; 0 where it is not here.

    Raises:
        ConfigError: the matrices fit no layer of the adapter.
        DataError: the adapter's config.json cannot be read.
    """
    if not Path(config.adapter.model, "config.json").is_file():
        return 0, 0
    # Seconds of imports, which only a run with low-rank matrices pays for.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prefixrl.learner import lora

    try:
        shape = AutoConfig.from_pretrained(config.adapter.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except (OSError, ValueError) as error:
        raise DataError(
            f"adapter.model = {config.adapter.model!r} is no model folder transformers can load: {error}"
        ) from error
    lora.add(model, settings, 0)
    actor = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return actor, actor + int(shape.get_text_config().hidden_size)


def _target_memory(config: RunConfig) -> list[str]:
    if config.target is None:
        return ["no target: a scorer loads the adapter's tokenizer and needs no device"]
    if config.scorer.engine == "openai":
        return [
            f"target: served at {config.scorer.openai.url}; a scorer loads its tokenizer and needs no device"
        ]
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
