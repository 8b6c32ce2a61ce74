"""An endpoint, asked until it answers: retries, rate limits, patience, counts.

Everything asynchronous here runs on one asyncio loop; other threads only read public attributes.
After a `Retry` the same request is made again, later and later; a Retry-After holds all requests
of all scorers back, for `patience_s` at most. Each request waits for its turn first (`pacing.py`);
that wait has no limit and is no outage. The wait for an answer ends when

    - something is answered: `outage` is None again;
    - one row has failed for `patience_s`, or twice had no answer within `request_s`, while a trial is answered: that
      row is `RowRefused`;
    - nothing, the trial included, has been answered for `patience_s`: PeerLost;
    - at the start, the host has had no address for `UNRESOLVED_S`: UserError.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, TypeVar

import msgspec

from prefixrl.common.config.workers.served import OpenAIConfig, ServerConfig
from prefixrl.common.errors import PeerLost, UserError
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.scorer.served import chat
from prefixrl.scorer.served import protocol as completions
from prefixrl.scorer.served.http_client import HttpClient, Reader
from prefixrl.scorer.served.pacing import Pacing, Stopwatch
from prefixrl.scorer.served.protocol import (
    Completed,
    EndpointRefused,
    RequestForm,
    Retry,
    RowRefused,
    ServedModel,
)

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MOST_BACKOFF_S = 30.0
MOST_UNCONNECTED_S = 5.0
UNRESOLVED_S = 30.0
"""Patience with an unknown host name: a name may be published later than its host starts."""
MOST_LATE = 2
"""Requests of a row without an answer in time, after which the row is refused."""
MOST_NAMES = 20
MOST_FAILED_LISTS = 3
"""Errors of the server instead of a list of models, after which a model with a name is tried without it."""
BELIEVED = frozenset({401, 402, 403})
"""Statuses that end a run at any time: a key that was withdrawn, no credit."""
LOG_EVERY_S = 10.0
"""Least time between two log lines about an endpoint that answers only now and then."""

T = TypeVar("T")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Outage:
    """An ongoing outage: the time at which it began, and the newest reason."""

    since_s: float
    reason: str
    paused_s: float = 0.0
    """Seconds until then in which no request could be made for the run's own limits."""

    @property
    def age_s(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.since_s


class Endpoint(Generic[Answer]):
    """An endpoint with its retries, waits and counts."""

    kind: str
    """The words for it in messages."""
    hint: str
    """Likely faults of the address, behind its key."""

    def __init__(
        self,
        section: ServerConfig,
        path: str,
        read: Reader[Answer | Retry | RowRefused | EndpointRefused],
        pacing: Pacing | None = None,
    ) -> None:
        """Open the client; raises UserError if there is no key or a proxy cannot be used.

        `pacing`: the turns of requests; None: each is made at once.
        """
        assert section.url is not None, "it is asked for where there is an address"
        self.url = section.url
        self._path = path
        self._read = read
        self.asking = 0
        """Number of requests under way."""
        self._asked_s = 0.0
        self._counted_s = time.monotonic()
        self._limited = 0
        """Number of rows that wait for a rate limit."""
        self._limited_watch = Stopwatch()
        self._pacing = pacing or Pacing()
        self.counts = Usage()
        self.outage: Outage | None = None
        """The time without any answer; None while the endpoint answers."""
        self._section = section
        self._rest: Outage | None = None
        """The newest rest that the endpoint asked for by Retry-After."""
        self._rest_until_s = 0.0
        self._logged_s = -LOG_EVERY_S
        self._random = random.Random()
        self._client = HttpClient(section)
        self._seats = asyncio.Semaphore(section.requests)
        self._trial = b""
        self._has_answered = False

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.close()

    @property
    def waits(self) -> Outage | None:
        """The outage or rest that rows wait for; None while they are answered."""
        is_resting = self._limited and self._rest_left_s > 0
        return self.outage or (self._present_rest if is_resting else None)

    @property
    def limit_words(self) -> str:
        """The run's own limits while rows wait for them, in words; else ""."""
        return self._pacing.words

    async def _try(self) -> Answer | Retry | RowRefused | EndpointRefused:
        return await self._request(self._trial)

    async def _insist(self, ask: Callable[[], Awaitable[T | Retry]]) -> T:
        """Ask until there is an answer; raises PeerLost or, for an unknown host, UserError."""
        tries = 0
        resolved_s = time.monotonic()
        patience_s = self._section.patience_s
        name = self._section.NAME
        while isinstance(outcome := await ask(), Retry):
            tries += 1
            if tries == 1:
                log.warning(
                    "waiting for %s, for %s.patience_s = %g s at most", self.url, name, patience_s
                )
            # A host without an address is most likely misspelt: that wait is short.
            if not outcome.is_unresolved:
                resolved_s = time.monotonic()
            elif time.monotonic() - resolved_s > min(UNRESOLVED_S, patience_s):
                raise UserError(
                    f"{name}.url = {self.url!r}: this host is not known here ({outcome.reason}); check its name"
                )
            self._check_patience()
            await self._back_off(outcome, tries)
            await self._sleep(min(self._rest_left_s, patience_s), outcome.is_limit)
        return outcome

    async def answer(self, content: bytes) -> Answer | RowRefused:
        """Return the answer to a request, however often it must be sent; raises UserError or PeerLost."""
        tries = 0
        late = 0
        begun: Outage | None = None
        while True:
            # While this row backs off, its seat is free for rows that may be answered.
            async with self._seats:
                await self._let_rest()
                outcome = await self._request(content)
            if isinstance(outcome, EndpointRefused):
                self._refuse(outcome)
            if not isinstance(outcome, Retry):
                return outcome
            tries += 1
            late += outcome.is_late
            begun = begun or self._outage(outcome.reason)
            # A trial tells whose fault it is: if it is answered, that of this row; if not, the
            # endpoint's, and the wait goes on.
            is_hopeless = late >= MOST_LATE or self._is_over(begun)
            is_asked = is_hopeless or self._is_over(self.outage)
            if is_asked and await self._answers() and is_hopeless:
                return RowRefused(
                    f"the endpoint answers a trial, but not this row in {tries} requests: {outcome.reason}"
                )
            await self._back_off(outcome, tries)

    async def _answers(self) -> bool:
        """Send the trial; return True if it is answered; raises PeerLost or UserError."""
        outcome = await self._try()
        if isinstance(outcome, EndpointRefused):
            self._refuse(outcome)
        self._check_patience()
        return not isinstance(outcome, Retry)

    def _outage(self, reason: str) -> Outage:
        return Outage(time.monotonic(), reason, self._pacing.paused_s)

    def _spent_s(self, outage: Outage) -> float:
        """Return the patience that an outage has used up; waits for the run's own limits use none."""
        return outage.age_s - (self._pacing.paused_s - outage.paused_s)

    def _is_over(self, outage: Outage | None) -> bool:
        return outage is not None and self._spent_s(outage) > self._section.patience_s

    def _check_patience(self) -> None:
        if self.outage and self._is_over(self.outage):
            self._end_with_outage(self.outage)

    @property
    def asked_s(self) -> float:
        """Seconds of all requests so far, requests under way included."""
        return self._asked_s + self.asking * (time.monotonic() - self._counted_s)

    def _count_asking(self, more: int) -> None:
        self._asked_s, self._counted_s = self.asked_s, time.monotonic()
        self.asking += more

    @property
    def limited_s(self) -> float:
        """Seconds so far in which at least one row waited for a rate limit, the endpoint's or the run's own."""
        return self._limited_watch.total_s

    def _count_limited(self, more: int) -> None:
        self._limited += more
        self._limited_watch.run(self._limited > 0)

    async def _request(self, content: bytes) -> Answer | Retry | RowRefused | EndpointRefused:
        self._count_limited(self._pacing.is_on)
        try:
            await self._pacing.turn(lambda: self.counts)
        finally:
            self._count_limited(-self._pacing.is_on)
        self._count_asking(1)
        self._pacing.begin()
        try:
            outcome = await self._client.post(f"{self.url}{self._path}", content, self._read)
            if (
                isinstance(outcome, EndpointRefused)
                and self._has_answered
                and outcome.status not in BELIEVED
            ):
                # A proxy answers so while its backend is replaced.
                outcome = Retry(outcome.reason)
            self._has_answered |= not isinstance(outcome, Retry | RowRefused | EndpointRefused)
            self._update_health(outcome)
        finally:
            self._count_asking(-1)
            self._pacing.end()
        self.count(requests=not isinstance(outcome, Retry))
        self.count(
            prompt_tokens=getattr(outcome, "prompt_tokens", None) or 0,
            completion_tokens=getattr(outcome, "completion_tokens", None) or 0,
        )
        return outcome

    def _update_health(self, outcome: object) -> None:
        """Keep whether the endpoint answers, and how long a rest it asks for."""
        if not isinstance(outcome, Retry):
            self.outage = None
            return
        self.count(retries=1)
        now_s = time.monotonic()
        reason = outcome.reason
        if self.outage is None and now_s - self._logged_s > LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("%s: %s", self.url, reason)
        self.outage = replace(self.outage or self._outage(reason), reason=reason)
        if outcome.is_limit and outcome.after_s is not None:
            since_s = self._rest.since_s if self._rest and self._own_rest_left_s else now_s
            self._rest = Outage(since_s, f"{reason} (Retry-After: {outcome.after_s:.0f} s)")
            self._rest_until_s = max(self._rest_until_s, now_s + outcome.after_s)
            self._pacing.permits.own_rest_until_s = self._rest_until_s

    def count(self, **more: int) -> None:
        """Add to the counts."""
        totals = {name: getattr(self.counts, name) + count for name, count in more.items()}
        self.counts = msgspec.structs.replace(self.counts, **totals)

    @property
    def _own_rest_left_s(self) -> float:
        return max(0.0, self._rest_until_s - time.monotonic())

    @property
    def _rest_left_s(self) -> float:
        return max(self._own_rest_left_s, self._pacing.permits.rest_until_s - time.monotonic())

    @property
    def _present_rest(self) -> Outage | None:
        if self._own_rest_left_s or not self._rest_left_s:
            return self._rest
        since_s = self._pacing.permits.rest_since_s
        return Outage(since_s, "another scorer of the run was told to wait (Retry-After)")

    def _end_rest(self) -> None:
        permits = self._pacing.permits
        self._rest_until_s = permits.own_rest_until_s = permits.rest_until_s = 0.0

    async def _let_rest(self) -> None:
        """Hold a request until Retry-After has passed, then release it with jitter.

        A rest that outlasts the patience ends with a trial; raises PeerLost if that is not
        answered.
        """
        while left_s := self._rest_left_s:
            waits = [wait for wait in (self._present_rest, self.outage) if wait]
            if not waits:
                continue  # the rest has ended since
            begun = min(waits, key=lambda wait: wait.since_s)
            if self._is_over(begun):
                self._end_rest()  # one trial for all
                if not await self._answers():
                    self._end_with_outage(begun)
                continue
            left_s = min(left_s, max(0.0, self._section.patience_s - self._spent_s(begun)))
            await self._sleep(left_s + self._random.uniform(0.0, min(1.0, left_s)), is_limit=True)

    async def _back_off(self, outcome: Retry, tries: int) -> None:
        most_s = MOST_UNCONNECTED_S if outcome.is_unconnected else MOST_BACKOFF_S
        backoff_s = min(most_s, FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 16))
        await self._sleep(backoff_s * self._random.uniform(0.5, 1.0), outcome.is_limit)

    async def _sleep(self, duration_s: float, is_limit: bool) -> None:
        self._count_limited(is_limit)
        try:
            await asyncio.sleep(duration_s)
        finally:
            self._count_limited(-is_limit)

    def _end_with_outage(self, outage: Outage) -> NoReturn:
        raise PeerLost(
            f"the endpoint {self.url} has answered nothing for {self._spent_s(outage):.0f} s "
            f"({self._section.NAME}.patience_s = {self._section.patience_s:g}); the newest reason: {outage.reason}"
        )

    def _refuse(self, denied: EndpointRefused) -> NoReturn:
        section = self._section
        key = f"no key was sent: give the environment variable that holds it as {section.NAME}.key_variable"
        if section.key_variable is not None:
            key = f"the key is that of the environment variable {section.key_variable}"
        address = f"check {section.NAME}.url {self.hint}"
        problem, hint = {
            401: ("the key is wrong or missing", key),
            402: ("there is no credit left", key),
            403: ("the key may not do this", key),
            404: ("there is no such path or model", address),
        }.get(denied.status, (f"it is not {self.kind}", f"check {section.NAME}.url"))
        raise UserError(
            f"the endpoint {self.url} refuses every request: {problem} ({denied.reason}); {hint}"
        )


class ModelEndpoint(Endpoint[Completed]):
    """OpenAI's interface to one model, by completions or in messages."""

    def __init__(self, section: OpenAIConfig, pacing: Pacing | None = None) -> None:
        path, read = (
            ("/chat/completions", chat.read)
            if section.is_chat
            else ("/completions", completions.read)
        )
        self.kind = "a chat endpoint" if section.is_chat else "a completions endpoint"
        super().__init__(section, path, read, pacing)
        self.form = RequestForm(section.has_extensions, section.omit, section.extra)
        self._options = section
        self._is_model_listed = False
        self._failed_lists = 0

    @property
    def hint(self) -> str:  # type: ignore[override]
        """Likely faults of the address, behind its key; once the model was listed the address is right."""
        if not self._is_model_listed:
            return "(does it end in /v1?) and scorer.openai.model"
        other = "completions" if self._options.is_chat else "chat"
        needs = "" if self._options.is_chat else ', which needs target.placement = "advice"'
        return f'and scorer.openai.api: it lists the model, but has no {self._path}; try "{other}"{needs}'

    async def find_model(self, usual_name: str | None = None) -> ServedModel:
        """Return the model that the config names, or the only one; raises UserError or PeerLost.

        Args:
            usual_name: the name of a model that the config does not name.
        """
        name = self._options.model or usual_name
        ask = self._models if name is None else self._models_if_listed
        models: list[ServedModel] | EndpointRefused = await self._insist(ask)
        if isinstance(models, EndpointRefused):
            if name is not None and (models.status in (404, 405) or models.status >= 500):
                log.warning("%s lists no models (%s): %r is tried", self.url, models.reason, name)
                return ServedModel(name)  # not every endpoint has a list
            self._refuse(models)
        self._is_model_listed = True
        if name is None and len(models) == 1:
            return models[0]
        for model in models:
            if model.id == name:
                return model
        names = sorted(model.id for model in models)
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        problem = "is missing" if name is None else f"= {name!r} is not served there"
        raise UserError(
            f"scorer.openai.model {problem}: the endpoint {self.url} serves "
            f"{', '.join(names[:MOST_NAMES]) or 'nothing'}{more}; give one of these"
        )

    async def try_out(self, content: bytes) -> Completed | RowRefused:
        """Send a request as the run will; return its answer, or the refusal of its keys."""
        self._trial = content
        outcome: Completed | RowRefused | EndpointRefused = await self._insist(self._try)
        if isinstance(outcome, EndpointRefused):
            self._refuse(outcome)
        return outcome

    def refuse_trial(self, refused: RowRefused, keys: str) -> NoReturn:
        """Raise the error for a trial whose request is refused; `keys` may mend it."""
        raise UserError(
            f"the endpoint {self.url} refuses a completion as this run asks for it: {refused.reason}\nthe "
            f"request was {self._trial.decode()}; see {keys}"
        )

    async def _models(self) -> list[ServedModel] | Retry | EndpointRefused:
        outcome = await self._client.models()
        self._update_health(outcome)
        return outcome

    async def _models_if_listed(self) -> list[ServedModel] | Retry | EndpointRefused:
        """Ask for the list; a server that fails at it again and again refuses it."""
        outcome = await self._models()
        if isinstance(outcome, Retry) and outcome.status >= 500:
            self._failed_lists += 1
            if self._failed_lists >= MOST_FAILED_LISTS:
                return EndpointRefused(outcome.status, outcome.reason)
        return outcome
