"""A process reward model in vLLM: logprobs of a step's two candidates, or classes at every token by pooling."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.engines.vllm.setup import CPU_KV_CACHE_BYTES, platform_of, prepare_processes
from prefixrl.common.errors import DataError
from prefixrl.common.models.config_file import positions_of
from prefixrl.common.models.loading import check_model
from prefixrl.scorer.process.formats import Marked, StepForm
from prefixrl.scorer.process.step_scoring import StepModel
from prefixrl.scorer.process.torch_model import (
    check_candidates,
    description_of,
    good_shares,
    head_of,
)


class VllmStepModel(StepModel):
    """A loaded model, of either format."""

    def __init__(self, folder: str, settings: ProcessModelConfig, form: StepForm) -> None:
        """Start vLLM; raises DataError or ConfigError for a model that it cannot score with."""
        hf_config = check_model(folder, *description_of(folder, settings)).get_text_config()
        self._is_causal = settings.format == "step_tag"
        limit = positions_of(hf_config.to_dict())
        # A step's prompt needs room for the token that is drawn after it.
        self.most_positions = None if limit is None else limit - int(self._is_causal)
        if self._is_causal:
            self._columns = form.candidates()
            check_candidates(self._columns, int(hf_config.vocab_size), settings)
        else:
            head_of(folder, settings)
            self._columns = (settings.good_class, 1 - settings.good_class)
        platform = platform_of(settings.device)
        prepare_processes(threads=1, is_one_process=platform == "cpu")
        own_dtype = str(hf_config.dtype or torch.bfloat16).removeprefix("torch.")
        longest = min(settings.max_tokens + 1, limit or settings.max_tokens + 1)
        arguments: dict[str, Any] = {
            "model": folder,
            "dtype": own_dtype if settings.dtype == "auto" else settings.dtype,
            "max_model_len": longest,
            "max_num_batched_tokens": max(settings.batch_tokens, longest),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        if platform == "cpu":
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        else:
            arguments["gpu_memory_utilization"] = settings.device_share
        try:
            self._llm = _started(arguments, self._is_causal)
        except (ValueError, RuntimeError) as error:
            raise DataError(
                f"scorer.prm.model: vLLM cannot load {folder} as {settings.format}: {error}"
            ) from error

    def step_scores(self, rows: Sequence[Marked]) -> list[float]:
        """Return the scores by the logprobs of the candidates, or by the classes of the head."""
        return self._by_logprobs(rows) if self._is_causal else self._by_classes(rows)

    def _by_logprobs(self, rows: Sequence[Marked]) -> list[float]:
        from vllm import SamplingParams

        good, bad = self._columns
        sampling = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            logprobs=2,
            allowed_token_ids=[good, bad],
            detokenize=False,
        )
        prompts = [
            {"prompt_token_ids": row.tokens[: position + 1].tolist()}
            for row in rows
            for position in row.tag_positions
        ]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [math.exp(output.outputs[0].logprobs[0][good].logprob) for output in outputs]

    def _by_classes(self, rows: Sequence[Marked]) -> list[float]:
        prompts = [{"prompt_token_ids": row.tokens.tolist()} for row in rows]
        outputs = self._llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
        scores: list[float] = []
        for row, output in zip(rows, outputs, strict=True):
            logits = output.outputs.data[list(row.tag_positions)]
            scores += good_shares(logits, self._columns)
        return scores


def _started(arguments: dict[str, Any], is_causal: bool) -> Any:
    from vllm import LLM

    if is_causal:
        return LLM(**arguments, logprobs_mode="processed_logprobs", enable_prefix_caching=True)
    from vllm.config import PoolerConfig

    # Classes at every token: vLLM's own choice of tags would count those that stand in a text, too.
    pooler = PoolerConfig(task="token_classify", tok_pooling_type="ALL", use_activation=False)
    return LLM(**arguments, runner="pooling", pooler_config=pooler)
