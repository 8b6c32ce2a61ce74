"""An engine whose model is served elsewhere, by an OpenAI-compatible completions endpoint.

    worker's loop ── submit ──▶ `row_jobs.py` ── a request per row, `requests` at once ──▶ endpoint
          ▲ step() ◀── queue of finished jobs ◀── retries, rate limits (`endpoint.py`) ◀── completions ──┘

A row is sent as the target's own tokenizer rendered it, prefix included, and is continued. While
the endpoint answers nothing, `waits_for` names the reason and `progress` grows, because that wait
ends by itself. A row that cannot be continued is a row with an error. An endpoint that is silent
for longer than the patience, or refuses every request, ends the worker with a named error.
"""

import asyncio
import logging
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import wait

import msgspec
import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Continuation, Job, JobResult, TokenIds
from prefixrl.common.engines.interface.row_jobs import RowJobs, end_other_tasks
from prefixrl.common.errors import UserError
from prefixrl.common.prompts.rendering import renderer_of
from prefixrl.common.seeds import row_seed
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.common.worker.permits import Permits
from prefixrl.scorer.served import protocol as completions
from prefixrl.scorer.served.endpoint import ModelEndpoint
from prefixrl.scorer.served.pacing import pacing_of
from prefixrl.scorer.served.protocol import Completed, RowRefused, ServedModel

log = logging.getLogger(__name__)

CLOSE_S = 5.0
WATCH_EVERY_S = 0.2


RaiseIfHopeless = Callable[[], None]
"""Raises an error that ends a wait."""


class ServedEngine(RowJobs):
    """An engine over an endpoint; its seats are the rows that it requests at once."""

    name = "openai"

    def __init__(
        self, config: RunConfig, raise_if_hopeless: RaiseIfHopeless, permits: Permits | None
    ) -> None:
        """Connect and try the endpoint out; raises UserError if it refuses, PeerLost if silent.

        Args:
            raise_if_hopeless: may end the wait by an error.
            permits: requests that the broker lets it make; None where there is no broker.
        """
        super().__init__()
        self._section = config.scorer.openai
        self.offer(self._section.requests)
        self._endpoint = ModelEndpoint(self._section, pacing_of(config, permits))
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        thread.start()
        # Before the trial: a refusal has to end the loop and its thread too.
        self.close = weakref.finalize(self, _shut_down, self._endpoint, self._loop, thread)
        """Drops all jobs and connections; called at exit too."""
        try:
            greeting = asyncio.run_coroutine_threadsafe(
                self._greet(config.scorer_sampling()), self._loop
            )
            while not greeting.done():
                raise_if_hopeless()
                wait([greeting], WATCH_EVERY_S)
            self._model = greeting.result()
        except BaseException:
            self.close()
            raise

    @property
    def served_model(self) -> str:
        """The target's name at the endpoint."""
        return self._model.id

    def step(self, timeout_s: float) -> list[JobResult]:
        """Wait a bounded time for jobs; raises PeerLost after `patience_s` or UserError if refused."""
        results = self._results(timeout_s)
        self.progress += bool(self.waits_for)
        return results

    @property
    def busy_row_s(self) -> float:
        """Seconds of all requests so far; a row that waits to repeat one has no seat."""
        return self._endpoint.asked_s

    @property
    def waiting_rows(self) -> int:
        """Number of rows without a request under way."""
        return max(0, self.open_rows - self._endpoint.asking)

    @property
    def waits_for(self) -> str:
        """The endpoint and its fault, or the run's own limit; "" while rows are answered or nothing is requested."""
        if not self._open:
            return ""
        waits = self._endpoint.waits
        if waits is None:
            return self._endpoint.limit_words
        return f"{self._endpoint.url} for {waits.age_s:.0f} s: {waits.reason}"

    @property
    def usage(self) -> Usage:
        """The requests and tokens so far."""
        return msgspec.structs.replace(self._endpoint.counts, limited_s=self._endpoint.limited_s)

    # --- on the asyncio loop -----------------------------------------------------------------------------------------

    @abstractmethod
    async def _greet(self, sampling: Sampling) -> ServedModel:
        """Find the model and request a few tokens from it, with the settings of the run."""

    def _count(self, written: Completed, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer; `..._tokens` where the endpoint does not count them."""
        self._endpoint.count(
            prompt_tokens=prompt_tokens if written.prompt_tokens is None else 0,
            completion_tokens=completion_tokens if written.completion_tokens is None else 0,
        )
        self.progress += 1 + completion_tokens
        self.tokens += completion_tokens


class OpenAIEngine(ServedEngine):
    """An engine over a completions endpoint."""

    def __init__(
        self,
        model: str,
        config: RunConfig,
        raise_if_hopeless: RaiseIfHopeless,
        permits: Permits | None = None,
    ) -> None:
        """Connect and try the endpoint out; of the folder `model` only the tokenizer is used."""
        self._renderer = renderer_of(config, "scorer", model)
        self._is_warned = False
        super().__init__(config, raise_if_hopeless, permits)

    async def _greet(self, sampling: Sampling) -> ServedModel:
        """Find the model and request one token from it, with the settings of the run."""
        model = await self._endpoint.find_model()
        one_token = msgspec.structs.replace(sampling, max_new_tokens=1)
        stops = self._renderer.stop_tokens
        job = Job("trial", (self._renderer.encode("1"),), np.zeros((1, 1)), one_token, stops)
        endpoint = self._endpoint
        outcome = await endpoint.try_out(self._content(model.id, job, 0, 1))
        if isinstance(outcome, RowRefused):
            endpoint.refuse_trial(
                outcome,
                "scorer.openai.dialect, scorer.openai.prompt, and the scorer's temperature, top_k, top_p, min_p",
            )
        if endpoint.form.has_extensions and outcome.tokens is None:
            raise UserError(
                f"the endpoint {endpoint.url} does not know vLLM's extensions: its completion came without token ids, "
                'so that stop tokens, top_k and min_p would be ignored in silence; use scorer.openai.dialect = "openai"'
            )
        return model

    async def _row(self, job: Job, index: int) -> Continuation:
        size, context = job.rows[index].size, self._model.max_model_len
        limit = job.sampling.max_new_tokens
        limit = limit if context is None else min(limit, context - size)
        if limit < 1:
            return row_without(
                f"{size} tokens leave no room in the endpoint's context of {context}"
            )
        outcome = await self._endpoint.answer(self._content(self._model.id, job, index, limit))
        if isinstance(outcome, RowRefused):
            return row_without(f"{self._endpoint.url}: {outcome.reason}")
        return self._written(outcome, job.rows[index], job.stop_tokens)

    def _content(self, model: str, job: Job, index: int, limit: int) -> bytes:
        ids, section, stops = job.rows[index], self._section, sorted(job.stop_tokens)
        # An endpoint of OpenAI's own dialect always adds a BOS.
        form = self._endpoint.form
        text = (
            self._renderer.decode_with_special
            if form.has_extensions
            else self._renderer.decode_without_bos
        )
        request = completions.RowRequest(
            model=model,
            prompt=ids.tolist() if section.prompt == "tokens" else text(ids),
            sampling=msgspec.structs.replace(job.sampling, max_new_tokens=limit),
            seed=row_seed(job.uniforms[index]) if section.seeded else None,
            stop_tokens=stops,
            stops=list(
                map(self._piece, sorted(stops, key=lambda stop: stop != self._renderer.closer))
            ),
        )
        return completions.body(request, form)

    def _piece(self, token: int) -> str:
        return self._renderer.decode_with_special(np.asarray([token], dtype=np.int32))

    def _written(self, written: Completed, row: TokenIds, stops: frozenset[int]) -> Continuation:
        """Convert an answer, up to its first stop; raises UserError if it continues another prompt.

        An endpoint may take fewer stops than there are, or show those that it does not know as
        text.
        """
        if written.prompt is not None and written.prompt != row.tolist():
            self._compare(written.prompt, row)
        if written.tokens is None:
            places = [
                place for stop in stops if (place := written.text.find(self._piece(stop))) >= 0
            ]
            text: str | None = written.text[: min(places, default=len(written.text))]
            tokens = self._renderer.encode(text or "")
            is_ended = text != written.text
        else:
            tokens, text = np.asarray(written.tokens, dtype=np.int32), None
            ends = np.flatnonzero(np.isin(tokens, list(stops)))
            tokens = tokens[: ends[0] + 1] if ends.size else tokens  # the stop included
            is_ended = tokens.size < len(written.tokens)
        # Tokens that the endpoint does not count are counted here.
        self._count(written, row.size, tokens.size)
        finish = "eos" if is_ended else written.finish
        prompt_tokens = row.size if written.prompt_tokens is None else written.prompt_tokens
        no_logprobs = np.zeros(0, np.float32)
        return Continuation(tokens, no_logprobs, finish, (), text, prompt_tokens=prompt_tokens)

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


def row_without(reason: str) -> Continuation:
    """Return the row of a text that could not be completed."""
    return Continuation(np.zeros(0, np.int32), np.zeros(0, np.float32), "error", (), error=reason)


def _shut_down(
    endpoint: ModelEndpoint, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    try:
        asyncio.run_coroutine_threadsafe(_end(endpoint), loop).result(CLOSE_S)
    except TimeoutError:
        log.warning("the connections to %s did not close within %g s", endpoint.url, CLOSE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(CLOSE_S)
    if not loop.is_running():
        loop.close()


async def _end(endpoint: ModelEndpoint) -> None:
    await end_other_tasks()
    await endpoint.close()
