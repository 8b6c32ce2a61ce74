"""Device memory of a scorer's process reward model, which lies on the scorer's first GPU.

In transformers it takes what it needs, and keeps no keys and values. In vLLM it takes a share of the device, as the
target does: weights, keys and values, and work must fit there.
"""

from dataclasses import dataclass
from pathlib import Path

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.step_rewards import ProcessModelConfig
from prefixrl.learner.check.footprint import CONTEXT_BYTES, GIB
from prefixrl.learner.check.model_shapes import parameters, shape_of, unknown_size

HIDDEN_COPIES = 12
"""Hidden states that a layer holds at once without gradients: residual, norms, attention and the wide inner layer."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
    given: float | None
    """vLLM's share of the device; None: what is needed."""

    @property
    def needed(self) -> int:
        """The least bytes with which it can score."""
        return self.weights + self.forward + self.text_cache + self.context

    def share(self, limit_bytes: int) -> float:
        """Return the share of its device that it takes."""
        return self.needed / limit_bytes if self.given is None else self.given


def process_footprint(config: RunConfig) -> ProcessFootprint | None:
    """Return the bytes; None without such a model, on a CPU, or where its size is not known."""
    prm = config.scorer.prm
    if prm is None or prm.device == "cpu" or (known := parameters(prm.model)) is None:
        return None
    weights, width = _weights(prm, known[0])
    shape, is_vllm = shape_of(prm.model), prm.engine == "vllm"
    text_cache = int(shape.cache_bytes(1) * width * prm.max_tokens) if shape and is_vllm else 0
    has_context = config.target is not None and config.scorer.engine == "transformers" and config.scorer.device != "cpu"
    return ProcessFootprint(
        weights=weights,
        forward=int(prm.batch_tokens * shape.hidden * width * HIDDEN_COPIES) if shape else 0,
        text_cache=text_cache,
        context=0 if has_context and not is_vllm else CONTEXT_BYTES,
        given=prm.device_share if is_vllm else None,
    )


def process_share(config: RunConfig, limit_bytes: int | None) -> float:
    """Return the share of a scorer's first GPU for the model; 0 without one, or of unknown size."""
    found = process_footprint(config)
    return 0.0 if found is None or limit_bytes is None else found.share(limit_bytes)


def process_lines(config: RunConfig, limit_bytes: int | None) -> list[str]:
    """Return the line of a scorer's process reward model; none without."""
    prm = config.scorer.prm
    if prm is None:
        return []
    known, shape = parameters(prm.model), shape_of(prm.model)
    if known is None:
        return [f"a scorer's process reward model: {unknown_size(prm.model)}"]
    weights, width = _weights(prm, known[0])
    text = f"{weights / GIB:.2f} GiB of weights"
    if shape is not None:
        forward = prm.batch_tokens * shape.hidden * width * HIDDEN_COPIES
        text += f", about {forward / GIB:.2f} GiB for a forward of {prm.batch_tokens:,} tokens"
    found = process_footprint(config)
    if found is None:
        return [f"a scorer's process reward model, on the CPU: {text}"]
    if found.text_cache:
        text += f", {found.text_cache / 2**20:.1f} MiB of keys and values per text of full length"
    beside = ", beside its target" if config.target is not None and config.scorer.engine != "openai" else ""
    of = "" if limit_bytes is None else f"; {found.share(limit_bytes):.2f} of a GPU of {limit_bytes / GIB:.1f} GiB"
    return [f"a scorer's process reward model{beside}: {text}{of}"]


def process_fault(config: RunConfig, limit_bytes: int | None) -> str:
    """Return the refusal of a model that its device or share is too small for, or ""."""
    found = process_footprint(config)
    if found is None or limit_bytes is None:
        return ""
    room = limit_bytes if found.given is None else int(found.given * limit_bytes)
    if found.needed <= room:
        return ""
    where = f"{limit_bytes / GIB:.1f} GiB"
    remedy = "lower scorer.prm.batch_tokens, or name a smaller model"
    if found.given is not None:
        where = f"{found.given:.2f} of {where}"
        remedy = f"raise scorer.prm.gpu_memory_utilization, {remedy}"
    return (
        f"the process reward model needs {found.needed / GIB:.1f} GiB ({found.weights / GIB:.1f} of weights) and has "
        f"{where}; {remedy}"
    )


def _weights(prm: ProcessModelConfig, count: int) -> tuple[int, float]:
    """Return bytes of all weights, and of one."""
    on_disk = sum(path.stat().st_size for path in Path(prm.model).glob("*.safetensors"))
    if prm.dtype == "auto" and on_disk:
        return on_disk, on_disk / count
    width = _DTYPE_BYTES.get(prm.dtype, 2)
    return width * count, width
