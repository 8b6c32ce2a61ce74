"""The throughput engine: vLLM's AsyncLLM, driven from the worker's loop.

    worker's loop ── submit ──▶ `row_jobs.py` ── rows ──▶ engine core, a process of vLLM's own, with its queue ──┐
          ▲ step() ◀── queue of finished jobs ◀── tokens ────────────────────────────────────────────────────────┘
    install: staged snapshot ──▶ every process of vLLM with a model maps and loads it (`plugin.py`)
             meanwhile running requests are paused; they go on with the new weights, their keys and values recomputed

Nothing here is bitwise repeatable: a row's company changes its logits in the last bits. What is exact: a token is drawn
from softmax(logits / temperature), whatever a model's generation_config holds, and logprobs are of that distribution.
"""

import asyncio
import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from prefixrl.common.config.workers.vllm import MOST_MASKED
from prefixrl.common.engines.interface.base import (
    AdapterEngine,
    Continuation,
    Job,
    JobResult,
    Watch,
    check_fit,
)
from prefixrl.common.engines.interface.row_jobs import RowJobs, end_other_tasks
from prefixrl.common.engines.vllm.checksum import compared, known_layout
from prefixrl.common.engines.vllm.facts import RowCounts, about, engine_config, seats_of
from prefixrl.common.engines.vllm.setup import (
    BACKEND,
    VllmSetup,
    engine_arguments,
    platform_of,
    prepare_environment,
)
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.models.loading import load_model
from prefixrl.common.seeds import row_seed
from prefixrl.common.weights.low_rank import AdapterFolders, are_low_rank, pairs
from prefixrl.common.weights.snapshot import Snapshot
from prefixrl.common.wire.messages.weights import EngineChecksum
from prefixrl.common.wire.packing import Logprobs, ProbeRow

log = logging.getLogger(__name__)

STREAM_TOKENS = 16
"""Tokens of a row per message from the engine core: enough to see progress, without a message per token."""
CONTROL_S = 600.0
"""Longest wait for an installation or a probe."""
PROBE_FIRST = -1
"""Priority of a probe; answers have 0."""
SHUTDOWN_S = 5.0
"""Time after which vLLM's processes are killed: they hold nothing that must be saved."""

T = TypeVar("T")


class VllmEngine(RowJobs, AdapterEngine):
    """Engine of vLLM, whose seats are the rows decoded at once; a scorer's makes no logprobs, which nothing reads."""

    name = "vllm"

    def __init__(self, setup: VllmSetup) -> None:
        super().__init__()
        platform = platform_of(setup.device)
        prepare_environment(setup, platform)
        self._setup = setup
        self._wants_logprobs = setup.role == "rollout"
        self._requests = 0
        self._own: dict[str, torch.Tensor] = {}
        """Names, shapes and dtypes of the weights, without values; empty until they are needed."""
        self._installed: Snapshot | None = None
        self._folders = AdapterFolders()
        self._adapter: Any = None
        """Adapter of all requests; None until matrices are installed."""
        self._known: frozenset[str] | None = None
        """Parameters whose checksums follow from a snapshot; None until they are asked for."""
        self._is_paused = False
        """True while requests are paused after an installation, so that a probe is scored before they go on."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run_loop, args=(self._loop,), name="vllm", daemon=True).start()
        self._counts = RowCounts()
        self._llm: Any = self._call(
            _start(engine_arguments(setup, platform), self._counts), None, "start"
        )
        self.offer(seats_of(self._llm.vllm_config))
        self.about = about(self._llm.vllm_config)
        log.info("vLLM of the %s: %s", setup.role, self.about)
        self._close = weakref.finalize(self, _shut_down, self._llm, self._loop)

    def close(self) -> None:
        """End vLLM's processes; happens at exit too."""
        self._close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None, what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except NotInTime:
            if future.done():
                raise  # the work's own
            future.cancel()
            raise PeerLost(f"vLLM did not {what} within {timeout_s} s") from None

    def submit(self, job: Job) -> None:
        """Queue a job; raises UserError when a row leaves no room for an answer."""
        longest = max((row.size for row in job.rows), default=0)
        if longest >= self._setup.max_model_len:
            raise UserError(
                f"a row of {longest} tokens leaves no room in a context of {self._setup.max_model_len}: lower "
                f"{self._setup.role}.max_prompt_tokens or raise {self._setup.role}.vllm.max_model_len"
            )
        if len(job.masked_tokens) > MOST_MASKED:
            raise UserError(
                f"{len(job.masked_tokens)} tokens are never drawn, vLLM leaves out {MOST_MASKED} at most; use "
                'rollout.engine = "transformers"'
            )
        super().submit(job)

    @property
    def busy_row_s(self) -> float:
        """Row-seconds in vLLM's batch so far, by its own count."""
        return self._counts.busy_row_s

    @property
    def waiting_rows(self) -> int:
        """Number of rows that vLLM does not decode."""
        return max(0, self.open_rows - self._counts.running)

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait for the next job to finish, at most `timeout_s`; raises the error of a failed job."""
        if self._is_paused:
            self._call(self._resume(), CONTROL_S, "resume")
        results = self._results(timeout_s)
        if not self._open:
            self._counts.note_idle()
        return results

    def _sampling(self, job: Job, index: int) -> Any:
        """Return vLLM's settings of a row."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Everything is named: nothing of what a SamplingParams may hold is left to a model's defaults.
        return SamplingParams(
            temperature=job.sampling.temperature,
            top_p=job.sampling.top_p,
            top_k=job.sampling.top_k,
            min_p=job.sampling.min_p,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=row_seed(job.uniforms[index]) if self._setup.vllm.seeded else None,
            max_tokens=job.sampling.max_new_tokens,
            stop_token_ids=sorted(job.stop_tokens),
            logit_bias=dict.fromkeys(sorted(job.masked_tokens), -math.inf) or None,
            ignore_eos=True,  # of the model's own; the stop tokens are the job's
            logprobs=0 if self._wants_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=STREAM_TOKENS,
        )

    async def _row(self, job: Job, index: int) -> Continuation:
        from vllm.inputs.engine import tokens_input

        tokens: list[int] = []
        logprobs: list[float] = []
        spans: tuple[tuple[int, int], ...] = ()
        watch = job.watch(index)
        was_stopped = False
        self._requests += 1
        outputs = self._llm.generate(
            tokens_input(prompt_token_ids=job.rows[index].tolist()),
            self._sampling(job, index),
            request_id=str(self._requests),
            lora_request=self._adapter,
        )
        # Closed at once: vLLM goes on with a request until then.
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                part = output.outputs[0]
                self.progress += len(part.token_ids)
                self.tokens += len(part.token_ids)
                ids = part.token_ids
                if watch is not None:
                    ids, was_stopped = _watched(ids, watch, job.stop_tokens)
                tokens.extend(ids)
                if self._wants_logprobs:
                    drawn = zip(part.logprobs[: len(ids)], ids, strict=True)
                    logprobs.extend(entry[token].logprob for entry, token in drawn)
                if part.weight_versions:  # with the last part, of the whole answer
                    spans = tuple(
                        (int(span.version), span.end - span.start) for span in part.weight_versions
                    )
                if was_stopped:
                    break
        return Continuation(
            np.asarray(tokens, dtype=np.int32),
            np.minimum(np.asarray(logprobs, dtype=np.float32), 0.0),
            "eos" if was_stopped or (tokens and tokens[-1] in job.stop_tokens) else "length",
            spans,
            was_stopped=was_stopped,
        )

    def install(self, snapshot: Snapshot) -> None:
        """Replace all weights; ValueError if they are not the model's, PeerLost if vLLM hangs."""
        if not self._own:
            self.weights()
        if self._setup.low_rank and are_low_rank(snapshot.tensors):
            matrices = pairs(snapshot.tensors, self._own)
            folder = self._folders.write(matrices, self._setup.low_rank)
            self._call(self._adapt(folder, snapshot.version), CONTROL_S, "install new matrices")
        else:
            check_fit(self._own, snapshot.tensors)
            self._call(self._update(snapshot), CONTROL_S, "install new weights")
        # vLLM has copied the bytes: from here on the memory of the version before may serve the next one.
        self._installed = snapshot
        self._is_paused = True

    async def _update(self, snapshot: Snapshot) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        manifest = msgspec.structs.replace(snapshot.manifest, deltas=())
        update = {"path": snapshot.memory.path, "manifest": msgspec.json.encode(manifest).decode()}
        await self._pause()
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.finish_weight_update(weight_version=str(snapshot.version))

    async def _adapt(self, folder: str, version: int) -> None:
        from vllm.lora.request import LoRARequest

        await self._pause()
        await self._llm.add_lora(LoRARequest(BACKEND, 1, folder, load_inplace=True))
        await self._llm.update_weight_version(str(version))
        self._adapter = LoRARequest(BACKEND, 1, folder)

    async def _pause(self) -> None:
        """Pause all requests after the present step and clear keys and values of the old weights."""
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights installed last, else the model folder's, as they are published."""
        if self._installed is not None:
            return {name: tensor.clone() for name, tensor in self._installed.tensors.items()}
        model = load_model(self._setup.model, self._setup.model, self._setup.published_dtype)
        tensors = {name: parameter.data for name, parameter in model.named_parameters()}
        self._own = {name: tensor.to("meta") for name, tensor in tensors.items()}
        return tensors

    def score(self, rows: Sequence[ProbeRow]) -> Logprobs:
        """Return the logprobs of the scored tokens of a probe, at temperature 1, end to end."""
        # A row is one forward: vLLM's prompt logprobs are at temperature 1 whatever is sampled at.
        return self._call(self._score(rows), CONTROL_S, "score a probe")

    async def _score(self, rows: Sequence[ProbeRow]) -> Logprobs:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        sampling = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        if self._open and not self._is_paused:
            await self._pause()  # else running answers may hold every seat until they end
            self._is_paused = True
        outputs = []
        for context, scored in rows:
            prompt = tokens_input(prompt_token_ids=[*context.tolist(), *scored.tolist()])
            outputs.append(await self._request_score(prompt, sampling))
        # All requests of the probe wait in vLLM's queue by now, before the answers that go on.
        if self._is_paused:
            await self._resume()
        logprobs: list[float] = []
        for (context, scored), output in zip(rows, outputs, strict=True):
            entries = list((await output.get()).prompt_logprobs)[context.size :]
            logprobs += [
                entry[int(token)].logprob for entry, token in zip(entries, scored, strict=True)
            ]
        return np.asarray(logprobs, dtype=np.float32)

    async def _request_score(self, prompt: Any, sampling: Any) -> Any:
        """Queue a request of a probe before all others."""
        self._requests += 1
        return await self._llm.add_request(
            str(self._requests), prompt, sampling, lora_request=self._adapter, priority=PROBE_FIRST
        )

    def checksum(self) -> EngineChecksum:
        """Return the checksum of what vLLM's processes compute with, compared with the snapshot."""
        calls = [self._llm.compute_weight_checksums()]
        if self._setup.low_rank:
            calls.append(self._llm.collective_rpc("adapter_sums"))
        sums: dict[str, str] = {}
        for work in calls:
            for part in self._call(work, CONTROL_S, "make checksums"):
                sums |= part
        dtype = getattr(torch, self._setup.dtype)
        if self._known is None:
            self._known = (
                known_layout(sums, self.weights(), dtype)
                if self._installed is None
                else frozenset()
            )
        installed = self._installed.tensors if self._installed and self._adapter is None else None
        return compared(sums, installed, self._known, dtype)

    async def _resume(self) -> None:
        await self._llm.resume_generation()
        self._is_paused = False


def _watched(
    ids: Sequence[int], watch: Watch, stop_tokens: frozenset[int]
) -> tuple[Sequence[int], bool]:
    """Return the new tokens of a row up to the one with which its watch ends it, and True if it does."""
    for place, token in enumerate(ids):
        if token not in stop_tokens and watch(token):
            return ids[: place + 1], True
    return ids, False


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _start(arguments: dict[str, Any], counts: RowCounts) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_vllm_config(
        engine_config(arguments), stat_loggers=[counts.of_engine], disable_log_stats=True
    )
    await llm.update_weight_version("0")
    return llm


def _shut_down(llm: Any, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(Exception):  # at exit; of a core that died there is nothing to end
        asyncio.run_coroutine_threadsafe(_end(llm), loop).result(2 * SHUTDOWN_S)
    loop.call_soon_threadsafe(loop.stop)


async def _end(llm: Any) -> None:
    await end_other_tasks()
    llm.shutdown(timeout=SHUTDOWN_S)
