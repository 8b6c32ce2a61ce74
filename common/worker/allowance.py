"""The division of an endpoint's rate limits among the scorers of a run. Pure: time is passed in.

    scorer ── demand: permits that it lacks ──▶ Allowance ── grant: permits in all ──▶ scorer ── a request per permit

A permit is one request. Requests and tokens flow into a level each, a little slower than their limit; a permit takes
one request and the usual tokens of a request out of them, and the true tokens are settled when the request has ended.
So in any minute no more is granted than a minute's flow and one full level.

Each scorer that lacks permits has a share of the flow, in proportion to what it lacks. Every permit belongs to the
scorer with the largest share, which is then one permit less: a scorer takes what is left after those that come before
it. A scorer that ends, lacks nothing or is silent has no place in that order.

What is granted is counted in all, never sent as a difference: a lost message costs nothing.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.worker import RequestDemand, RequestGrant, Usage

MINUTE_S = 60.0
MOST_RATE = 0.99
"""Largest part of a limit that is used: answers and clocks are never exact."""
MOST_EXCESS = 0.02
"""Excess over a limit, as a part of it, that no minute may have."""
LEVEL_BEATS = 1.5
"""Flow that a level holds, in heartbeats; at least a whole permit and the flow of one."""
SILENT_BEATS = 3
"""Heartbeats without a demand after which nothing is reserved for a scorer."""
REMEMBERED = 500
"""Newest requests, about, over which the tokens of a request are averaged."""


@dataclass(frozen=True)
class RateLimits:
    """The rate limits of a run; None: no limit."""

    requests_per_minute: float | None
    tokens_per_minute: float | None
    most_tokens: int
    """Most tokens of a request, prompt and completion: what one counts before any has ended."""

    @classmethod
    def of_run(cls, config: RunConfig) -> "RateLimits":
        """Return the limits of a run's endpoint; none where its target is not served."""
        section, scorer = config.scorer.openai, config.scorer
        if not scorer.is_served:
            return cls(None, None, 1)
        return cls(
            section.requests_per_minute, section.tokens_per_minute, config.most_request_tokens
        )

    @property
    def is_on(self) -> bool:
        """True if there is a limit."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


@dataclass
class _Holder:
    """A scorer."""

    permits: int
    """Permits granted in all."""
    ended: int
    """Requests that had ended at the last demand, failed ones included."""
    answered: int
    tokens: int
    lacking: int = 0
    heard_s: float = 0.0
    share: float = 0.0
    """Its part of the flow, less what it took, in permits."""
    open_permits: int = 0
    """Permits whose request has not ended."""
    open_tokens: float = 0.0
    """Tokens that these took out of the level."""
    rest_until_s: float = 0.0


class Allowance:
    """The permits of all scorers, and their common rest."""

    def __init__(self, limits: RateLimits, beat_s: float = 1.0) -> None:
        """`beat_s`: time between two demands of a scorer."""
        self._limits, self._beat_s = limits, beat_s
        # A minute may begin with a permit and the flow of a heartbeat in the level.
        self._rate = min(MOST_RATE, MINUTE_S / (MINUTE_S + 1.1 * beat_s))
        self._holders: dict[Hashable, _Holder] = {}
        self._answered, self._tokens = 0.0, 0.0
        """Requests that were answered, and their tokens; the oldest fade."""
        self._request_level = math.inf if limits.requests_per_minute is None else 1.0
        self._token_level = math.inf if limits.tokens_per_minute is None else 0.0
        self._flowed_s: float | None = None
        self._granted_s = 0.0
        """Time of the newest permit."""

    @property
    def request_tokens(self) -> float:
        """Tokens of a usual request; before one was answered, the most that one may have."""
        if not self._answered:
            return float(self._limits.most_tokens)
        return max(1.0, self._tokens / self._answered)

    @property
    def permits_per_s(self) -> float:
        """The flow, in permits; infinite without limits."""
        requests, tokens = self._flows
        per_s = math.inf if requests is None else requests
        return per_s if tokens is None else min(per_s, tokens / self.request_tokens)

    @property
    def is_limited(self) -> bool:
        """True if there is a limit."""
        return self._limits.is_on

    def least_s(self, requests: int) -> float:
        """Return the least time that the limits allow for so many usual requests."""
        return requests / self.permits_per_s

    def rest_s(self, now_s: float) -> float:
        """Return the time until which some scorer was told to make no request; 0 if none was."""
        return max((each.rest_until_s - now_s for each in self._holders.values()), default=0.0)

    def forget_holder(self, name: Hashable) -> None:
        """Drop a scorer that ended; its share returns to the others."""
        self._holders.pop(name, None)

    def grant(
        self, name: Hashable, demand: RequestDemand, usage: Usage, now_s: float
    ) -> RequestGrant:
        """Answer a scorer's demand; `usage` is what it had used by then."""
        holder = self._holders.get(name)
        if holder is None:
            ended = usage.requests + usage.retries
            tokens = usage.prompt_tokens + usage.completion_tokens
            holder = self._holders[name] = _Holder(demand.received, ended, usage.requests, tokens)
            # An endpoint may count nonsense.
            most_tokens = 2 * self._limits.most_tokens * max(1, usage.requests)
            self._remember(0, usage.requests, min(tokens, most_tokens))
        self._settle(holder, usage)
        self._flow(now_s)  # no level holds more than it may after it was settled
        holder.heard_s = now_s
        holder.rest_until_s = now_s + demand.rest_s
        holder.permits = max(holder.permits, demand.received)
        holder.lacking = max(0, demand.lacking - (holder.permits - demand.received))
        if self._limits.is_on and self.rest_s(now_s) <= 0.0:
            self._give_permits(holder, now_s)
        return RequestGrant(permits=holder.permits, rest_s=max(0.0, self.rest_s(now_s)))

    def repeated_grant(self, name: Hashable, now_s: float) -> RequestGrant | None:
        """Return what a scorer has, with the present rest; None for one without a demand so far."""
        holder = self._holders.get(name)
        if holder is None:
            return None
        return RequestGrant(permits=holder.permits, rest_s=max(0.0, self.rest_s(now_s)))

    def _give_permits(self, holder: _Holder, now_s: float) -> None:
        affordable = self._token_level / self.request_tokens
        if self._limits.tokens_per_minute is not None and not self._answered:
            # Single requests show how many tokens one has; one that never ends is not waited for.
            is_open = any(each.open_permits for each in self._holders.values())
            affordable = float(not is_open or now_s - self._granted_s > MINUTE_S)
        level = min(self._request_level, affordable)
        rivals = [each for each in self._lacking(now_s) if each is not holder]
        permits = 0
        while permits < holder.lacking and level - permits >= 1 + self._reserved(
            rivals, holder.share - permits
        ):
            permits += 1
        tokens = permits * self.request_tokens
        holder.permits += permits
        holder.lacking -= permits
        holder.share = max(holder.share - permits, -self._most_share)
        holder.open_permits += permits
        holder.open_tokens += tokens
        self._granted_s = now_s if permits else self._granted_s
        self._request_level -= permits
        self._token_level -= tokens

    @staticmethod
    def _reserved(rivals: list[_Holder], share: float) -> int:
        """Return the permits that others get before a scorer with this share gets one."""
        return sum(min(each.lacking, math.ceil(max(0.0, each.share - share))) for each in rivals)

    def _lacking(self, now_s: float) -> list[_Holder]:
        since_s = now_s - SILENT_BEATS * self._beat_s
        return [each for each in self._holders.values() if each.lacking and each.heard_s >= since_s]

    def _flow(self, now_s: float) -> None:
        """Fill the levels and the shares by the time that has passed."""
        passed_s = 0.0 if self._flowed_s is None else max(0.0, now_s - self._flowed_s)
        self._flowed_s = now_s
        requests, tokens = self._flows
        seconds = LEVEL_BEATS * self._beat_s
        if requests is not None:
            level = self._request_level + passed_s * requests
            # A level bounds a burst, but holds one request at least, or none would be granted.
            self._request_level = min(level, max(1.0 + self._beat_s * requests, seconds * requests))
        if tokens is not None:
            level = self._token_level + passed_s * tokens
            least = self.request_tokens + self._beat_s * tokens
            # Before the first answer the tokens of a usual request are not known, so none gather.
            most = max(least, seconds * tokens) if self._answered else 0.0
            self._token_level = min(level, most)
        if not self._limits.is_on:
            return
        lacking = self._lacking(now_s)
        total = sum(each.lacking for each in lacking)
        for holder in lacking:
            part = holder.lacking / total
            share = holder.share + part * passed_s * self.permits_per_s
            # A scorer that waited for long must not take all permits of the others at once.
            holder.share = min(share, max(1.0, part * self._most_share))

    @property
    def _most_share(self) -> float:
        """A full level, in permits."""
        return max(1.0, LEVEL_BEATS * self._beat_s * self.permits_per_s)

    @property
    def _flows(self) -> tuple[float | None, float | None]:
        """Requests and tokens per second; None without that limit."""
        requests, tokens = self._limits.requests_per_minute, self._limits.tokens_per_minute
        if requests is not None:
            requests *= self._rate / MINUTE_S
        if tokens is not None:
            # A minute may begin with a full level, which holds a whole request at least.
            whole = max(tokens / 2, (1 + MOST_EXCESS) * tokens - self.request_tokens)
            tokens = min(self._rate * tokens, whole) / MINUTE_S
        return requests, tokens

    def _settle(self, holder: _Holder, usage: Usage) -> None:
        """Exchange the usual tokens of requests that have ended for their true ones."""
        ended = usage.requests + usage.retries
        tokens = usage.prompt_tokens + usage.completion_tokens
        more, more_tokens = ended - holder.ended, tokens - holder.tokens
        if more < 0 or more_tokens < 0:
            more = more_tokens = 0  # another process has this name now
        # An endpoint may count nonsense.
        more_tokens = min(more_tokens, 2 * self._limits.most_tokens * max(1, more))
        if holder.open_permits:
            closed = min(more, holder.open_permits)
            charged = holder.open_tokens * closed / holder.open_permits
            holder.open_permits -= closed
            holder.open_tokens -= charged
            self._token_level += charged - more_tokens
        self._remember(holder.answered, usage.requests, more_tokens)
        holder.ended, holder.answered, holder.tokens = ended, usage.requests, tokens

    def _remember(self, before: int, answered: int, tokens: int) -> None:
        """Take the tokens of a scorer's answers since `before`; its first is a trial of a few tokens."""
        more = answered - max(1, before)
        if more <= 0:
            return
        if self._answered > REMEMBERED:
            self._answered, self._tokens = self._answered / 2, self._tokens / 2
        self._answered += more
        self._tokens += tokens
