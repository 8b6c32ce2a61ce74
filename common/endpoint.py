"""A completions endpoint, asked until it answers: retries, rate limits, patience, counts.

Everything asynchronous here runs on one asyncio loop; other threads only read what is public. What `completions` calls `Again`
is asked again with the very same request, later and later; a Retry-After holds all requests back, for `patience_s` at most.
The wait is over when

    - something is answered: `trouble` is None again;
    - one row has failed for `patience_s`, or had no answer within `request_s` twice, while a trial is answered: then that
      row is `Rejected`;
    - nothing, the trial included, has been answered for `patience_s`: PeerLost;
    - at the start, the host has had no address for `UNRESOLVED_S`: UserError.
"""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NoReturn, TypeVar

import httpx2
import msgspec

from prefixrl.common import completions
from prefixrl.common.completions import Again, Denied, Model, Rejected, Written
from prefixrl.common.endpoint_client import http_client, key_of
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.messages import Usage
from prefixrl.common.openai_options import OpenAIConfig

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MOST_BACKOFF_S = 30.0
MOST_UNCONNECTED_S = 5.0
UNRESOLVED_S = 30.0
"""A name may be known a little later than its host is there."""
MOST_LATE = 2
"""Requests of a row that are made although the row never has an answer in time."""
NAMES_TOLD = 20
TELL_EVERY_S = 10.0
"""Between two lines of the log about an endpoint that now answers and now does not."""

T = TypeVar("T")
Reader = Callable[[int, Mapping[str, str], bytes, datetime], T]
"""What an answer's status, headers and content mean, now."""


@dataclass(frozen=True)
class Trouble:
    """Since when something does not go as it should, and what came last instead."""

    since_s: float
    reason: str

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.since_s


class Endpoint:
    """See the module text."""

    def __init__(self, section: OpenAIConfig) -> None:
        """Raises UserError where the key is not in the environment, or its proxies cannot be used."""
        assert section.url is not None, 'engine = "openai" has an address'
        self.url = section.url
        self.asking = 0
        """Requests under way."""
        self.limited = 0
        """Rows that wait for a rate limit."""
        self.counts = Usage()
        self.trouble: Trouble | None = None
        """Since when nothing was answered."""
        self._section = section
        self._rest: Trouble | None = None
        """The rest that was asked for last."""
        self._rest_until_s = 0.0
        self._told_s = -TELL_EVERY_S
        self._random = random.Random()
        self._key = key_of(section)
        self._client = http_client(section, self._key)
        self._seats = asyncio.Semaphore(section.requests)
        self._trial = b""

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    @property
    def waits(self) -> Trouble | None:
        """What rows wait for now; None while they are answered."""
        is_resting = self.limited and self._rest_left_s > 0
        return self.trouble or (self._rest if is_resting else None)

    # --- the start -------------------------------------------------------------------------------------------------------

    async def find_model(self) -> Model:
        """The model that the config names, or the only one there is.

        Raises:
            UserError: wrong key, wrong address, no such host, unknown model.
            PeerLost: the endpoint does not answer.
        """
        wanted = self._section.model
        found: list[Model] | Denied = await self._insist(self._models)
        if isinstance(found, Denied):
            if found.status in (404, 405) and wanted is not None:
                return Model(wanted)  # not every endpoint has a list
            self._refuse(found)
        if wanted is None and len(found) == 1:
            return found[0]
        for model in found:
            if model.id == wanted:
                return model
        names = sorted(each.id for each in found)
        more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
        problem = "is missing" if wanted is None else f"= {wanted!r} is not served there"
        raise UserError(
            f"scorer.openai.model {problem}: the endpoint {self.url} serves "
            f"{', '.join(names[:NAMES_TOLD]) or 'nothing'}{more}; give one of these"
        )

    async def try_out(self, row: completions.Row) -> None:
        """Have one row completed the way many will be, so that what the endpoint refuses is told before the run begins.

        Raises:
            UserError: something of the request is refused, or would be ignored in silence.
            PeerLost: the endpoint does not answer.
        """
        dialect = self._section.dialect
        self._trial = completions.body(row, dialect)
        outcome: Written | Rejected | Denied = await self._insist(self._try)
        if isinstance(outcome, Rejected):
            raise UserError(
                f"the endpoint {self.url} refuses a completion as this run asks for it: {outcome.reason}\nit was asked with "
                f"{self._trial.decode()}; see scorer.openai.dialect, scorer.openai.prompt, and the scorer's temperature, "
                "top_k, top_p, min_p"
            )
        if isinstance(outcome, Denied):
            self._refuse(outcome)
        if dialect == "vllm" and outcome.tokens is None:
            raise UserError(
                f"the endpoint {self.url} does not know vLLM's extensions: its completion came without token ids, so that stop "
                'tokens, top_k and min_p would be left out in silence; use scorer.openai.dialect = "openai"'
            )

    async def _try(self) -> Written | Again | Rejected | Denied:
        return await self._ask(self._trial)

    async def _models(self) -> list[Model] | Again | Denied:
        return await self._exchange(
            self._client.build_request("GET", f"{self.url}/models"), completions.read_models
        )

    async def _insist(self, ask: Callable[[], Awaitable[T | Again]]) -> T:
        """Ask until there is an answer; raises PeerLost when the patience is over, UserError where there is no such host."""
        tries, resolved_s, patience_s = 0, time.monotonic(), self._section.patience_s
        while isinstance(outcome := await ask(), Again):
            tries += 1
            if tries == 1:
                log.warning(
                    "waiting for %s, for scorer.openai.patience_s = %g s at most",
                    self.url,
                    patience_s,
                )
            if not outcome.is_unresolved:
                resolved_s = time.monotonic()
            elif time.monotonic() - resolved_s > min(UNRESOLVED_S, patience_s):
                raise UserError(
                    f"scorer.openai.url = {self.url!r}: this host is not known here ({outcome.reason}); check its name"
                )
            self._check_patience()
            await self._back_off(outcome, tries)
            await self._sleep(min(self._rest_left_s, patience_s), outcome.is_limit)
        return outcome

    # --- a row -----------------------------------------------------------------------------------------------------------

    async def complete(self, row: completions.Row) -> Written | Rejected:
        """A row's continuation, however often it has to be asked for; raises UserError, PeerLost."""
        content = completions.body(row, self._section.dialect)
        tries, late = 0, 0
        begun: Trouble | None = None
        while True:
            async with self._seats:
                await self._let_rest()
                outcome = await self._ask(content)
            match outcome:
                case Denied():
                    self._refuse(outcome)
                case Written() | Rejected():
                    return outcome
            tries, late = tries + 1, late + outcome.is_late
            begun = begun or Trouble(time.monotonic(), outcome.reason)
            is_hopeless = late >= MOST_LATE or self._is_over(begun)
            is_asked = is_hopeless or self._is_over(self.trouble)
            if is_asked and await self._answers() and is_hopeless:
                return Rejected(
                    f"the endpoint answers a trial, but not this row in {tries} requests: {outcome.reason}"
                )
            await self._back_off(outcome, tries)

    async def _answers(self) -> bool:
        """Whether a trial is answered; raises PeerLost where nothing was for too long, UserError where nothing will be."""
        outcome = await self._try()
        if isinstance(outcome, Denied):
            self._refuse(outcome)
        self._check_patience()
        return not isinstance(outcome, Again)

    def _is_over(self, trouble: Trouble | None) -> bool:
        return trouble is not None and trouble.age_s > self._section.patience_s

    def _check_patience(self) -> None:
        if self.trouble and self._is_over(self.trouble):
            self._give_up(self.trouble)

    async def _ask(self, content: bytes) -> Written | Again | Rejected | Denied:
        request = self._client.build_request(
            "POST",
            f"{self.url}/completions",
            content=content,
            headers={"content-type": "application/json"},
        )
        self.asking += 1
        try:
            outcome = await self._exchange(request, completions.read)
        finally:
            self.asking -= 1
        self._counts_more(requests=not isinstance(outcome, Again))
        if not isinstance(outcome, Denied):
            self.count(outcome.prompt_tokens or 0, outcome.completion_tokens or 0)
        return outcome

    async def _exchange(self, request: httpx2.Request, read: Reader[T]) -> T | Again:
        """One request; whatever goes wrong on the way is `Again`."""
        outcome: T | Again
        try:
            async with asyncio.timeout(self._section.request_s):
                answer = await self._client.send(request)
            outcome = read(answer.status_code, answer.headers, answer.content, datetime.now(UTC))
        except TimeoutError:
            outcome = Again(
                f"no answer within scorer.openai.request_s = {self._section.request_s:g}",
                is_late=True,
            )
        except (httpx2.HTTPError, OSError) as error:
            outcome = Again(
                f"{type(error).__name__}: {error}".removesuffix(": "),
                is_unconnected=isinstance(error, httpx2.ConnectError),
                is_unresolved=_is_unresolved(error),
            )
        outcome = self._shown(outcome)
        self._note(outcome)
        return outcome

    def _note(self, outcome: object) -> None:
        """Whether the endpoint is well, and how long it asks to be left alone."""
        if not isinstance(outcome, Again):
            self.trouble = None
            return
        self._counts_more(retries=1)
        now_s, reason = time.monotonic(), outcome.reason
        if self.trouble is None and now_s - self._told_s > TELL_EVERY_S:
            self._told_s = now_s
            log.warning("%s: %s", self.url, reason)
        self.trouble = Trouble(self.trouble.since_s if self.trouble else now_s, reason)
        if outcome.is_limit and outcome.after_s is not None:
            since_s = self._rest.since_s if self._rest and self._rest_left_s else now_s
            self._rest = Trouble(since_s, f"{reason} (Retry-After: {outcome.after_s:.0f} s)")
            self._rest_until_s = max(self._rest_until_s, now_s + outcome.after_s)

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Note what an answer cost."""
        self._counts_more(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)

    def _counts_more(self, **more: int) -> None:
        known = self.counts
        self.counts = msgspec.structs.replace(
            known, **{name: getattr(known, name) + count for name, count in more.items()}
        )

    # --- waiting ---------------------------------------------------------------------------------------------------------

    @property
    def _rest_left_s(self) -> float:
        return max(0.0, self._rest_until_s - time.monotonic())

    async def _let_rest(self) -> None:
        """Ask nothing before the endpoint's own time, and not everything at once then.

        A rest that outlasts the patience ends with a trial; raises PeerLost where that is not answered.
        """
        while left_s := self._rest_left_s:
            begun = min(filter(None, (self._rest, self.trouble)), key=lambda each: each.since_s)
            if self._is_over(begun):
                self._rest_until_s = 0.0  # one trial for all
                if not await self._answers():
                    self._give_up(begun)
                continue
            left_s = min(left_s, max(0.0, self._section.patience_s - begun.age_s))
            await self._sleep(left_s + self._random.uniform(0.0, min(1.0, left_s)), is_limit=True)

    async def _back_off(self, outcome: Again, tries: int) -> None:
        most_s = MOST_UNCONNECTED_S if outcome.is_unconnected else MOST_BACKOFF_S
        backoff_s = min(most_s, FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 16))
        await self._sleep(backoff_s * self._random.uniform(0.5, 1.0), outcome.is_limit)

    async def _sleep(self, duration_s: float, is_limit: bool) -> None:
        self.limited += is_limit
        try:
            await asyncio.sleep(duration_s)
        finally:
            self.limited -= is_limit

    # --- errors ----------------------------------------------------------------------------------------------------------

    def _give_up(self, trouble: Trouble) -> NoReturn:
        raise PeerLost(
            f"the endpoint {self.url} has answered nothing for {trouble.age_s:.0f} s "
            f"(scorer.openai.patience_s = {self._section.patience_s:g}); the last of it: {trouble.reason}"
        )

    def _refuse(self, denied: Denied) -> NoReturn:
        section = self._section
        key = (
            "no key was sent: name the environment variable that holds it in scorer.openai.key_variable"
            if section.key_variable is None
            else f"the key is that of the environment variable {section.key_variable}"
        )
        what, hint = {
            401: ("the key is wrong or missing", key),
            402: ("there is no credit left", key),
            403: ("the key may not do this", key),
            404: (
                "there is no such path or model",
                f"check scorer.openai.url (does it end in /v1?) and scorer.openai.model = {section.model!r}",
            ),
        }.get(denied.status, ("it is no completions endpoint", "check scorer.openai.url"))
        raise UserError(
            f"the endpoint {self.url} refuses every request: {what} ({denied.reason}); {hint}"
        )

    def _shown(self, outcome: T) -> T:
        """An outcome that may be logged."""
        if isinstance(outcome, Again | Rejected | Denied):
            return replace(outcome, reason=completions.shown(outcome.reason, self._key))
        return outcome


def _is_unresolved(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None
