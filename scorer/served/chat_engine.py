"""An engine whose model is asked in messages, at a chat endpoint.

A row is a conversation in JSON, and behind it the beginning of an answer if the endpoint is to
continue one (`ChatRenderer`). What comes back is a text; its tokens are known by number alone.
"""

import dataclasses

import msgspec
import numpy as np

from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Continuation, Job, TokenIds
from prefixrl.common.errors import UserError
from prefixrl.common.prompts.rendering import messages_of
from prefixrl.common.seeds import row_seed
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.worker.permits import Permits
from prefixrl.scorer.served import chat
from prefixrl.scorer.served.engine import RaiseIfHopeless, ServedEngine, row_without
from prefixrl.scorer.served.protocol import Completed, RowRefused, RowRequest, ServedModel

BYTES_PER_TOKEN = 4
"""Usual length of a token, for endpoints that count none."""
TRIAL_TOKENS = 16
_TRIAL = {"role": "user", "content": chat.TRIAL_QUESTION}
_KEYS = "scorer.openai.omit, scorer.openai.extra, scorer.openai.dialect and the scorer's temperature and top_p"


class ChatEngine(ServedEngine):
    """An engine over a chat endpoint."""

    def __init__(
        self,
        model: str,
        config: RunConfig,
        raise_if_hopeless: RaiseIfHopeless,
        permits: Permits | None = None,
    ) -> None:
        """Connect and try the endpoint out; `model` is the target's name there, unless the section has one."""
        self._usual_name = model
        self._has_advice = config.has_advice
        super().__init__(config, raise_if_hopeless, permits)

    async def _greet(self, sampling: Sampling) -> ServedModel:
        endpoint = self._endpoint
        model = await endpoint.find_model(self._usual_name)
        greedy = msgspec.structs.replace(sampling, max_new_tokens=TRIAL_TOKENS)
        if not self._has_advice:
            greedy = msgspec.structs.replace(greedy, temperature=0.0)
        request = RowRequest(model.id, "", greedy, 1 if self._section.seeded else None, (), ())
        beginning = "" if self._has_advice else chat.TRIAL_BEGINNING

        async def try_form() -> Completed | RowRefused:
            return await endpoint.try_out(chat.body(request, [_TRIAL], beginning, endpoint.form))

        outcome = await try_form()
        # A refusal names the key that the endpoint wants for the limit, so the second trial has it.
        if isinstance(outcome, RowRefused) and chat.OTHER_LIMIT_KEY in outcome.reason:
            endpoint.form = dataclasses.replace(endpoint.form, limit_key=chat.OTHER_LIMIT_KEY)
            outcome = await try_form()
        if isinstance(outcome, RowRefused) and self._has_advice:
            endpoint.refuse_trial(outcome, _KEYS)
        if not self._has_advice:
            self._check_continued(outcome)
        return model

    def _check_continued(self, outcome: Completed | RowRefused) -> None:
        """Raise UserError unless the trial's answer goes on where its beginning ended."""
        if isinstance(outcome, RowRefused):
            happened = f"it refused a begun answer: {outcome.reason}"
        elif outcome.text.strip().startswith(chat.TRIAL_NEXT):
            return
        else:
            happened = (
                f"asked to go on behind {chat.TRIAL_BEGINNING!r} it wrote {outcome.text[:80]!r}"
            )
        raise UserError(
            f"the chat endpoint {self._endpoint.url} does not continue an answer that is begun ({happened}), so that a "
            f'prefix of it would be lost; use target.placement = "advice", which puts the text into the question, or '
            f'scorer.openai.api = "completions" where the endpoint has it'
        )

    async def _row(self, job: Job, index: int) -> Continuation:
        messages, prefix = messages_of(job.rows[index])
        request = RowRequest(
            model=self._model.id,
            prompt="",
            sampling=job.sampling,
            seed=row_seed(job.uniforms[index]) if self._section.seeded else None,
            stop_tokens=(),
            stops=(),
        )
        content = chat.body(request, messages, prefix, self._endpoint.form)
        outcome = await self._endpoint.answer(content)
        if isinstance(outcome, RowRefused):
            return row_without(f"{self._endpoint.url}: {outcome.reason}")
        tokens = outcome.completion_tokens
        if tokens is None:
            tokens = -(-len(outcome.text.encode()) // BYTES_PER_TOKEN)
        prompt_tokens = outcome.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = job.rows[index].size // BYTES_PER_TOKEN
        self._count(outcome, prompt_tokens, tokens)
        # Nothing reads these ids, only how many they are.
        unknown: TokenIds = np.zeros(tokens, dtype=np.int32)
        no_logprobs = np.zeros(0, dtype=np.float32)
        return Continuation(
            unknown,
            no_logprobs,
            outcome.finish,
            (),
            outcome.text,
            prompt_tokens=prompt_tokens,
        )
