"""An answer to a problem: prefix and completion, or in direct mode all by the adapter.

    problem ──▶ prompt of the adapter ──▶ prefix ──▶ prompt of the target + prefix ──▶ completion ──▶ text
       └─ adapter.sees = "draft": first an answer of the target without advice, for the prompt of the adapter

Greedy answers are those of `prefixrl generate`: the same prompts, limits, stops and treatment of the prefix.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import TokenIds
from prefixrl.common.prompts.rendering import Texts, continued_prefix, sent_text
from prefixrl.common.seeds import derive, row_uniforms
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.deploy.serve.api_request import ApiError, ApiRequest
from prefixrl.deploy.serve.choosing import Chooser
from prefixrl.deploy.serve.engine_thread import EngineThread, SharedRow
from prefixrl.deploy.serve.openai_format import AnswerPart, Finish

Emit = Callable[[AnswerPart], Awaitable[None]]
_NO_TOKENS: TokenIds = np.zeros(0, dtype=np.int32)
UNFINISHED = "\ufffd"
"""Stand-in for a character with missing bytes."""


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    engine: EngineThread
    renderer: Texts


@dataclass(frozen=True)
class BestOf:
    """The choice of every answer among several."""

    count: int
    chooser: Chooser


Prompts = list[TokenIds]
"""The prompts of one problem, that of the model that ends the answer last: the adapter's, then the target's if any.
With `target.placement = "advice"` the target's is the prompt without advice."""


class Answering:
    """Answers problems with the models of a run."""

    def __init__(
        self,
        config: RunConfig,
        adapter: Model,
        target: Model | None,
        suffix: str = "",
        best_of: BestOf | None = None,
    ) -> None:
        """`target` is None in direct mode. `suffix` is appended to every problem."""
        self._config = config
        self._best_of = best_of
        self._adapter = adapter
        self._target = target
        self._suffix = suffix
        limit = config.evaluation.max_new_tokens or config.scorer.max_new_tokens
        self._completion_tokens = (
            0 if target is None else limit + config.scorer.most_extension_tokens
        )
        self._masked = adapter.renderer.never_drawn(config.rollout.control_tokens)
        # One thread: a tokenizer is not made for several.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")

    @property
    def most_tokens(self) -> int:
        """The longest answer."""
        return self._config.max_sampled_tokens + self._completion_tokens

    def prompt_tokens(self, prompts: Prompts) -> int:
        """Return the tokens of the prompt that the answer ends; the adapter's where the target's are not known."""
        is_known = self._target is None or self._config.scorer.has_tokenizer
        return prompts[-1 if is_known else 0].size

    def rows(self, request: ApiRequest) -> int:
        """Return the answers that a request has written."""
        candidates = self._best_of.count if self._best_of and self._is_sampled(request) else 1
        return len(request.problems) * request.n * candidates

    @property
    def models(self) -> list[Model]:
        """The loaded models."""
        return [self._adapter] if self._target is None else [self._adapter, self._target]

    async def prompts(self, request: ApiRequest) -> list[Prompts]:
        """Render every problem; raise ApiError for a problem that is too long."""
        return await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, self._prompts, request
        )

    def _prompts(self, request: ApiRequest) -> list[Prompts]:
        prompts = []
        for problem in request.problems:
            try:
                rendered = [
                    model.renderer.prompt(problem + self._suffix, request.system)
                    for model in self.models
                ]
            except ValueError as error:
                remedy = "the limits are rollout.max_prompt_tokens and scorer.max_prompt_tokens"
                name = "messages" if request.is_chat else "prompt"
                raise ApiError(
                    400, f"{name}: {error}; {remedy}", name, "context_length_exceeded"
                ) from None
            prompts.append(rendered)
        return prompts

    async def answer(self, request: ApiRequest, prompts: list[Prompts], emit: Emit) -> None:
        """Write all answers at the same time; `emit` receives their parts."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(prompts):
                    problem_seed = derive(seed, "problem", number)
                    # One task for all answers to a problem: its draft is asked of the target once.
                    adapter_prompt = group.create_task(
                        self._adapter_prompt(request, number, prompt)
                    )
                    for sample in range(request.n):
                        answer = _Answer(
                            request,
                            prompt,
                            adapter_prompt,
                            derive(problem_seed, sample),
                            number * request.n + sample,
                            self._uses_run_temperature(request),
                        )
                        write = self._answer
                        if self._best_of and self._is_sampled(request):
                            write = self._best_answer
                        group.create_task(write(answer, emit))
        # The first fault is what the client is told.
        except BaseExceptionGroup as errors:
            fault: BaseException = errors
            while isinstance(fault, BaseExceptionGroup):
                fault = fault.exceptions[0]
            raise fault from None

    def _uses_run_temperature(self, request: ApiRequest) -> bool:
        """True where several answers are wanted and the request names no temperature."""
        return self._best_of is not None and "temperature" not in request.model_fields_set

    def _is_sampled(self, request: ApiRequest) -> bool:
        return request.temperature > 0.0 or self._uses_run_temperature(request)

    async def _best_answer(self, answer: "_Answer", emit: Emit) -> None:
        """Write several answers, and emit the best as one part with the tokens of all."""
        assert self._best_of is not None
        candidates: list[list[AnswerPart]] = [[] for _ in range(self._best_of.count)]
        async with asyncio.TaskGroup() as group:
            for number, parts in enumerate(candidates):
                candidate = replace(answer, seed=derive(answer.seed, "candidate", number))
                group.create_task(self._answer(candidate, _collector(parts)))
        texts = ["".join(part.text for part in parts) for parts in candidates]
        problem = answer.request.problems[answer.index // answer.request.n] + self._suffix
        best = await asyncio.to_thread(self._best_of.chooser.best_index, problem, texts)
        tokens = sum(part.tokens for parts in candidates for part in parts)
        await emit(AnswerPart(answer.index, texts[best], tokens, candidates[best][-1].finish))

    async def _answer(self, answer: "_Answer", emit: Emit) -> None:
        config = self._config
        request = answer.request
        room = self._adapter.engine.most_positions
        adapter_prompt = await answer.adapter_prompt
        most = min(config.max_sampled_tokens, room - adapter_prompt.size)
        limit = most if request.max_tokens is None else min(most, request.max_tokens)
        row = SharedRow(
            adapter_prompt,
            answer.draws("prefix", limit),
            answer.sampling(config.rollout_sampling(), limit),
            self._adapter.renderer.stop_tokens,
            self._masked,
        )
        if self._target is None:
            await self._finish(answer, self._adapter, row, _NO_TOKENS, emit)
            return
        written = np.concatenate([piece.tokens async for piece in self._adapter.engine.pieces(row)])
        text = sent_text(config, self._adapter.renderer, written)
        # In a thread: a long text takes time, in which other answers go on.
        prompt, prefix = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, self._target_row, answer, written, text
        )
        # The client's limit is for the whole answer, of which the prefix is a part.
        limit = self._completion_tokens
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens - prefix.size)
        tokens = np.concatenate([prompt, prefix])
        limit = min(limit, self._target.engine.most_positions - tokens.size)
        row = SharedRow(
            tokens,
            answer.draws("completion", max(0, limit)),
            answer.sampling(config.scorer_sampling(), limit),
            self._target.renderer.stop_tokens,
        )
        await self._finish(answer, self._target, row if limit > 0 else None, prefix, emit)

    async def _adapter_prompt(self, request: ApiRequest, number: int, prompts: Prompts) -> TokenIds:
        """Return the adapter's prompt of a problem, with the target's draft in it where the adapter reads one."""
        if self._target is None or not self._config.adapter.sees_draft:
            return prompts[0]
        draft = await self._draft(self._target, prompts[-1])
        problem = request.problems[number] + self._suffix
        render = partial(self._adapter.renderer.prompt, problem, request.system, draft=draft)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, render)

    async def _draft(self, target: Model, prompt: TokenIds) -> str:
        """Return the target's greedy answer without advice; "" where it gives none."""
        config = self._config
        most = config.scorer.max_new_tokens + config.scorer.most_extension_tokens
        limit = min(most, target.engine.most_positions - prompt.size)
        if limit < 1:
            return ""
        sampling = config.scorer_sampling(0.0)
        sampling = msgspec.structs.replace(sampling, max_new_tokens=limit)
        stops = target.renderer.stop_tokens
        row = SharedRow(prompt, np.zeros(limit), sampling, stops)
        tokens: TokenIds = _NO_TOKENS
        text: str | None = None
        async for piece in target.engine.pieces(row):
            tokens = np.concatenate([tokens, piece.tokens])
            text = piece.text
        if text is None:
            text = target.renderer.text(target.renderer.without_stop(tokens))
        return StreamedText(target.renderer.text, config.scorer.stop_texts).add_text(text, True)

    def _target_row(
        self, answer: "_Answer", written: TokenIds, text: str | None
    ) -> tuple[TokenIds, TokenIds]:
        """Return the target's prompt and the beginning of its answer."""
        assert self._target is not None
        bare = answer.prompts[-1]
        if not self._config.has_advice:
            return bare, continued_prefix(self._target.renderer, written, text)[0]
        request = answer.request
        problem = request.problems[answer.index // request.n] + self._suffix
        try:
            prompt = self._target.renderer.prompt(problem, request.system, (), text or "")
        except ValueError:  # the target can be asked without this advice
            return bare, _NO_TOKENS
        return prompt, _NO_TOKENS

    async def _finish(
        self, answer: "_Answer", model: Model, row: SharedRow | None, begun: TokenIds, emit: Emit
    ) -> None:
        """Write the rest of an answer that starts with `begun`. Row None: the answer is complete."""
        text = StreamedText(
            model.renderer.text, (*answer.request.stop, *self._config.scorer.stop_texts)
        )
        tokens = begun
        index = answer.index
        first = text.add(tokens, is_last=row is None) if begun.size else ""
        if row is None or text.is_stopped:
            await emit(
                AnswerPart(index, first, begun.size, "stop" if text.is_stopped else "length")
            )
            return
        if begun.size:
            await emit(AnswerPart(index, first, begun.size))
        left_tokens = row.sampling.max_new_tokens
        async with aclosing(model.engine.pieces(row)) as pieces:
            async for piece in pieces:
                if piece.finish == "error":
                    raise ApiError(502, f"the target did not answer: {piece.error}")
                left_tokens -= piece.tokens.size
                tokens = np.concatenate([tokens, piece.tokens])
                is_ended = piece.finish == "eos"
                if piece.text is not None:
                    # An endpoint gave a text without its tokens, and all of it.
                    left_tokens = 0
                    new = text.add_text(model.renderer.text(begun) + piece.text, is_last=True)
                else:
                    whole = model.renderer.without_stop(tokens) if is_ended else tokens
                    new = text.add(whole, is_last=is_ended or not left_tokens)
                finish: Finish | None = None if left_tokens else "length"
                if is_ended or text.is_stopped:
                    finish = "stop"
                await emit(AnswerPart(index, new, piece.tokens.size, finish))
                if finish:
                    return


@dataclass(frozen=True)
class _Answer:
    """One requested answer."""

    request: ApiRequest
    prompts: Prompts
    adapter_prompt: Awaitable[TokenIds]
    seed: int
    index: int
    """Its number among all answers of the request."""
    uses_run_temperature: bool = False

    def draws(self, purpose: str, tokens: int) -> NDArray[np.float64]:
        """Return its random draws; greedy answers need no draws."""
        if self.request.temperature == 0.0 and not self.uses_run_temperature:
            return np.zeros(tokens)
        draws: NDArray[np.float64] = row_uniforms(self.seed, purpose, 1, tokens)[0]
        return draws

    def sampling(self, run_sampling: Sampling, tokens: int) -> Sampling:
        """Return the run's sampling with what the request changes."""
        top_p = run_sampling.top_p if self.request.top_p is None else self.request.top_p
        run_temperature = run_sampling.temperature
        return msgspec.structs.replace(
            run_sampling,
            temperature=run_temperature if self.uses_run_temperature else self.request.temperature,
            top_p=top_p,
            max_new_tokens=max(1, tokens),
        )


def _collector(parts: list[AnswerPart]) -> Emit:
    """Return a function that keeps the parts of an answer."""

    async def emit(part: AnswerPart) -> None:
        parts.append(part)

    return emit


class StreamedText:
    """The text of one growing answer. Its parts in order make up the whole answer, which ends before a stop text."""

    def __init__(self, text_of: Callable[[TokenIds], str], stops: Sequence[str]) -> None:
        self._text_of = text_of
        self._stops = tuple(stops)
        self._given = ""
        self.is_stopped = False
        """True after a stop text was found; the answer ends before it."""

    def add(self, ids: TokenIds, is_last: bool) -> str:
        """Return the text that is new in `ids`, all tokens so far."""
        return self.add_text(self._text_of(ids), is_last)

    def add_text(self, whole: str, is_last: bool) -> str:
        """Return the text that is new in `whole`, all text so far."""
        ends = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            whole = whole[: min(ends)]
        elif not is_last:
            # More tokens may change an unfinished character, or complete a stop.
            whole = whole.rstrip(UNFINISHED)
            begun = (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if whole.endswith(stop[:size])
            )
            whole = whole[: len(whole) - max(begun, default=0)]
        if not (self.is_stopped or is_last or whole.startswith(self._given)):
            return ""  # the tokenizer changed earlier text: more tokens may change it back
        new = whole[len(self._given) :]
        self._given += new
        return new
