"""An engine whose model is served elsewhere: an OpenAI-compatible completions endpoint, asked row by row.

    worker's loop ── submit ──▶ asyncio loop in a thread ── a request per row, `requests` at once ──▶ endpoint
          ▲ step() ◀── queue of finished jobs ◀── retries, rate limits (`endpoint.py`) ◀── completions ──┘

A row goes there as the target's own tokenizer rendered it, prefix included, and is continued. While the endpoint answers
nothing, `waits_for` says so and `progress` grows, because that wait ends by itself. A row that cannot be continued is a row
with an error; an endpoint that is gone for longer than the patience, or refuses every request, ends the worker by name.
"""

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from prefixrl.common import completions
from prefixrl.common.completions import Model, Rejected, Written
from prefixrl.common.config import RunConfig
from prefixrl.common.endpoint import Endpoint
from prefixrl.common.engine import Finished, Job, JobResult, TokenIds
from prefixrl.common.errors import UserError
from prefixrl.common.messages import Sampling, Usage
from prefixrl.common.rendering import Renderer
from prefixrl.common.seeds import row_seed

log = logging.getLogger(__name__)

CLOSE_S = 5.0
WATCH_EVERY_S = 0.2


@dataclass
class _Open:
    """A job that was begun."""

    rows: int
    done: int = 0


class OpenAIEngine:
    """See the module text. `slots` is the number of jobs whose rows are asked for together.

    Raises:
        UserError: the endpoint refuses what it is asked: a wrong key, an unknown model, a setting.
        PeerLost: it does not answer.
    """

    name = "openai"

    def __init__(self, model: str, config: RunConfig, watch: Callable[[], None]) -> None:
        """`model`: a folder with the target's tokenizer; weights are not needed. `watch`: as for `make_engine`."""
        self._section = config.scorer.openai
        self._renderer = Renderer(model, config.scorer.max_prompt_tokens)
        self.slots = max(1, self._section.requests // config.rows_per_job("scorer"))
        self.progress = 0
        self.busy_slot_s = 0.0
        self._limited_s = 0.0
        self._accounted_s = time.monotonic()
        self._waiting: deque[Job] = deque()
        self._running: dict[str, _Open] = {}
        self._finished: queue.SimpleQueue[tuple[str, Future[JobResult]]] = queue.SimpleQueue()
        self._is_warned = False
        self._endpoint = Endpoint(self._section)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _shut_down, self._endpoint, self._loop, thread)
        try:
            greeting = self._greet(config.scorer_sampling())
            self._model = _wait(asyncio.run_coroutine_threadsafe(greeting, self._loop), watch)
        except BaseException:
            self._close()
            raise

    def close(self) -> None:
        """Drop what is under way; happens at exit too."""
        self._close()

    @property
    def served_model(self) -> str:
        """The target's name at the endpoint."""
        return self._model.id

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; it begins as soon as one of its rows can be asked for."""
        self._waiting.append(job)
        self._start_waiting()

    def cancel(self, key: str) -> bool:
        """Drop a job of which nothing was asked for; False when it has begun or is unknown."""
        for job in self._waiting:
            if job.key == key:
                self._waiting.remove(job)
                return True
        return False

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait a bounded time for jobs to finish.

        Raises:
            PeerLost: the endpoint has answered nothing for as long as it is waited for.
            UserError: it refuses every request.
        """
        results: list[JobResult] = []
        while self._running:
            try:
                key, future = self._finished.get(timeout=0.0 if results else timeout_s)
            except queue.Empty:
                break
            self._account()
            del self._running[key]
            results.append(future.result())
        self._account()
        self.progress += bool(self.waits_for)
        self._start_waiting()
        return results

    def _start_waiting(self) -> None:
        self._account()
        while self._waiting and self._open_rows() < self._section.requests:
            job = self._waiting.popleft()
            begun = self._running[job.key] = _Open(len(job.rows))
            future = asyncio.run_coroutine_threadsafe(self._run(job, begun), self._loop)
            future.add_done_callback(partial(self._hand_over, job.key))

    def _open_rows(self) -> int:
        return sum(each.rows - each.done for each in self._running.values())

    def _hand_over(self, key: str, future: "Future[JobResult]") -> None:
        self._finished.put((key, future))

    def _account(self) -> None:
        """Slots are busy while the endpoint is asked something, not while it is waited for."""
        now_s = time.monotonic()
        passed_s, self._accounted_s = now_s - self._accounted_s, now_s
        if self._endpoint.asking:
            self.busy_slot_s += min(len(self._running), self.slots) * passed_s
        if self._endpoint.limited:
            self._limited_s += passed_s

    @property
    def waits_for(self) -> str:
        """The endpoint and what is wrong with it, "" while it answers or nothing is asked."""
        waits = self._endpoint.waits
        if waits is None or not self._running:
            return ""
        return f"{self._endpoint.url} for {waits.age_s:.0f} s: {waits.reason}"

    @property
    def usage(self) -> Usage:
        """What was asked for so far."""
        return msgspec.structs.replace(self._endpoint.counts, limited_s=self._limited_s)

    # --- weights: there are none here ------------------------------------------------------------------------------------

    def install(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Refused: a served target is frozen."""
        raise NotImplementedError("a target that is served elsewhere takes no weights")

    def weights(self) -> dict[str, torch.Tensor]:
        """Refused: they are elsewhere."""
        raise NotImplementedError("the weights of a target that is served elsewhere are not here")

    def logprobs(self, tokens: TokenIds, temperature: float) -> NDArray[np.float32]:
        """Refused: a scorer proves nothing."""
        raise NotImplementedError("a target that is served elsewhere is not probed")

    # --- on the asyncio loop ---------------------------------------------------------------------------------------------

    async def _greet(self, sampling: Sampling) -> Model:
        """Find the model and ask it for one token, in the way of the run."""
        model = await self._endpoint.find_model()
        one = msgspec.structs.replace(sampling, max_new_tokens=1)
        stops = self._renderer.stop_tokens
        trial = Job("trial", (self._renderer.encode("1"),), np.zeros((1, 1)), one, stops)
        await self._endpoint.try_out(self._request(model.id, trial, 0, 1))
        return model

    async def _run(self, job: Job, begun: _Open) -> JobResult:
        started_s = time.monotonic()

        async def row(index: int) -> Finished:
            finished = await self._row(job, index)
            begun.done += 1
            return finished

        rows = await asyncio.gather(*map(row, range(len(job.rows))))
        return JobResult(job.key, tuple(rows), time.monotonic() - started_s)

    async def _row(self, job: Job, index: int) -> Finished:
        size, context = job.rows[index].size, self._model.max_model_len
        limit = job.sampling.max_new_tokens
        limit = limit if context is None else min(limit, context - size)
        if limit < 1:
            return _without(f"{size} tokens leave no room in the endpoint's context of {context}")
        outcome = await self._endpoint.complete(self._request(self._model.id, job, index, limit))
        if isinstance(outcome, Rejected):
            return _without(f"{self._endpoint.url}: {outcome.reason}")
        return self._written(outcome, job.rows[index])

    def _request(self, model: str, job: Job, index: int, limit: int) -> completions.Row:
        ids, section, stops = job.rows[index], self._section, sorted(job.stop_tokens)
        return completions.Row(
            model=model,
            prompt=ids.tolist() if section.prompt == "tokens" else self._text(ids),
            sampling=msgspec.structs.replace(job.sampling, max_new_tokens=limit),
            seed=row_seed(job.uniforms[index]) if section.seeded else None,
            stop_tokens=stops,
            stops=[self._renderer.raw(np.asarray([stop], dtype=np.int32)) for stop in stops],
        )

    def _text(self, ids: TokenIds) -> str:
        """A prompt as text. An endpoint that cannot be told otherwise puts its BOS before it: then it is sent without."""
        if self._section.dialect == "vllm":
            return self._renderer.raw(ids)
        return self._renderer.unopened(ids)

    def _written(self, written: Written, row: TokenIds) -> Finished:
        """An answer as an engine tells it; raises UserError where it is one to another prompt."""
        if written.prompt is not None and written.prompt != row.tolist():
            self._compare(written.prompt, row)
        if written.tokens is None:
            tokens, text = self._renderer.encode(written.text), written.text
        else:
            tokens, text = np.asarray(written.tokens, dtype=np.int32), None
        # What the endpoint does not count is counted here.
        self._endpoint.count(
            row.size if written.prompt_tokens is None else 0,
            tokens.size if written.completion_tokens is None else 0,
        )
        self.progress += 1 + tokens.size
        return Finished(tokens, np.zeros(0, np.float32), written.finish, (), text)

    def _compare(self, read: list[int], row: TokenIds) -> None:
        if self._section.prompt == "tokens":
            raise UserError(
                f"the endpoint {self._endpoint.url} continued another prompt than it was given: tokens {read} for "
                f"{row.tolist()}; it must take token ids as they are"
            )
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "%s reads a prompt's text as other tokens than the target's own tokenizer made, for example %s for %s; "
                'scorer.openai.prompt = "tokens" sends the tokens themselves',
                self._endpoint.url,
                read,
                row.tolist(),
            )


def _wait(future: Future[Model], watch: Callable[[], None]) -> Model:
    while not future.done():
        watch()
        wait([future], WATCH_EVERY_S)
    return future.result()


def _without(reason: str) -> Finished:
    return Finished(np.zeros(0, np.int32), np.zeros(0, np.float32), "error", (), error=reason)


def _shut_down(
    endpoint: Endpoint, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    try:
        asyncio.run_coroutine_threadsafe(_end(endpoint), loop).result(CLOSE_S)
    except TimeoutError:
        log.warning("the connections to %s did not close within %g s", endpoint.url, CLOSE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(CLOSE_S)
    if not loop.is_running():
        loop.close()


async def _end(endpoint: Endpoint) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await endpoint.close()
