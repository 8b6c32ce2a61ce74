"""Rewards from a server of the user's: answers in batches, asked for until they are there (`endpoint.py`).

    POST URL    {"rows": [{"question": "…", "text": "…", "gold": "…", "tokens": 12, "finish": "stop", …}, …]}
    200         {"rewards": [0.5, {"reward": 1, "form": 0.2}, …]}       one per row, in their order

Anything else in the place of a reward is an `error` of its row. A batch that is refused (400, 413,
422, or no answer though others have one) is sent row by row, so that one row costs no other its
reward.
"""

import asyncio
import logging
import os
import select
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

import msgspec

from prefixrl.common.config.foreign.user_function import FACTS
from prefixrl.common.config.run import RewardConfig
from prefixrl.common.prompts.extract import MAX_ANSWER_CHARS, extract_answer
from prefixrl.common.wire.messages.fields import encodable
from prefixrl.common.wire.messages.groups import Fault
from prefixrl.scorer.served import protocol
from prefixrl.scorer.served.endpoint import Endpoint
from prefixrl.scorer.served.protocol import EndpointRefused, Retry, RowRefused
from prefixrl.scorer.verifier.complaints import Complaints
from prefixrl.scorer.verifier.pool_thread import LONGEST_WAIT_S, JudgeThread, SubmittedRow
from prefixrl.scorer.verifier.rewards import no_reward, reward_of
from prefixrl.scorer.verifier.rules.verify import Judgement

log = logging.getLogger(__name__)

RULE = "server"
"""Rule of a verdict that a server gave."""
GATHER_S = 0.01
"""Time in which answers that come together get into one batch."""


class Rewards(protocol.ServedPart):
    """The values that a server gave for the rows of a batch, rewards or not."""

    rewards: list[object]


def read(
    status: int, headers: Mapping[str, str], content: bytes, now: datetime
) -> Rewards | Retry | RowRefused | EndpointRefused:
    """Read the answer to a batch."""
    if status != 200:
        return protocol.failed(status, headers, content, now)
    try:
        return msgspec.json.decode(content, type=Rewards)
    except protocol.GARBLED as error:
        return Retry(
            f"an answer that holds no list of rewards ({error}): {protocol.message_of(content)}"
        )


class RewardEndpoint(Endpoint[Rewards]):
    """The server; its trial is the newest batch that it answered."""

    kind = "a server of rewards"
    hint = "(all of it: nothing is added to it)"

    async def rewards(self, rows: list[SubmittedRow]) -> list[object] | RowRefused:
        """Return what the server gives for a batch; raises UserError or PeerLost."""
        request = [
            {"question": question, "text": encodable(text), "gold": gold}
            | {name: getattr(facts, name) for name in FACTS}
            for _, text, gold, question, _, facts in rows
        ]
        content = msgspec.json.encode({"rows": request})
        self._trial = self._trial or content
        outcome = await self.answer(content)
        if isinstance(outcome, RowRefused):
            return outcome
        self._trial = content
        return outcome.rewards


class RewardServer(JudgeThread):
    """A server in place of the verifier; `poll` raises UserError where it refuses, PeerLost where it is silent."""

    def __init__(self, section: RewardConfig) -> None:
        """Open the client; raises UserError without the key."""
        self._section = section
        self._endpoint = RewardEndpoint(section, "", read)
        self._complaints = Complaints(log)
        self._is_over = False
        super().__init__()

    def close(self) -> None:
        """Drop what is open."""
        self._is_over = True
        self._thread.join()

    def _judge(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        woken = asyncio.Event()
        asking: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._woken, woken.set)
        try:
            while not self._is_over:
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), LONGEST_WAIT_S)
                woken.clear()
                with suppress(BlockingIOError):
                    os.read(self._woken, select.PIPE_BUF)
                for task in [task for task in asking if task.done()]:
                    asking.remove(task)
                    task.result()  # raises what ends the scorer
                # Texts come in bursts: those that arrive meanwhile share a request.
                await asyncio.sleep(GATHER_S)
                while self._submitted and len(asking) < self._section.requests:
                    count = min(len(self._submitted), self._section.rows)
                    rows = [self._submitted.popleft() for _ in range(count)]
                    asking.add(asyncio.create_task(self._request_scores(rows, woken)))
                waits = self._endpoint.waits if asking else None
                self.is_patient = waits is not None
                self.trouble = (
                    f"waiting for reward.url for {waits.age_s:.0f} s: {waits.reason}"
                    if waits
                    else ""
                )
        finally:
            await self._endpoint.close()

    async def _request_scores(self, rows: list[SubmittedRow], answered: asyncio.Event) -> None:
        try:
            rewards = await self._endpoint.rewards(rows)
        finally:
            answered.set()
        if isinstance(rewards, RowRefused) and len(rows) > 1:
            # One by one: a row that is refused costs no other its reward.
            for row in rows:
                await self._request_scores([row], answered)
            return
        for place, (key, text, *_) in enumerate(rows):
            if isinstance(rewards, RowRefused):
                verdict = self._error(rewards.reason, "server refused")
            elif len(rewards) != len(rows):
                reason = f"{len(rewards)} rewards for {len(rows)} rows"
                verdict = self._error(reason, "function returned no reward")
            else:
                verdict = self._judgement(rewards[place], text)
            self._verdicts.append((key, verdict))

    def _judgement(self, result: object, text: str) -> Judgement:
        reward, parts = reward_of(result, self._section.weights)
        if not 0.0 <= reward <= 1.0:
            reason = f"it gave {no_reward(result, self._section.weights)}"
            return self._error(reason, "function returned no reward")
        extracted = (extract_answer(text) or "")[:MAX_ANSWER_CHARS]
        return Judgement(reward, "ok", extracted, parts=parts, rule=RULE)

    def _error(self, reason: str, fault: Fault) -> Judgement:
        reason = f"reward.url {self._endpoint.url}: {reason}"
        if self._complaints.is_first((fault, 0), reason):
            log.warning("%s", reason)
        return Judgement(0.0, "error", encodable(reason)[:MAX_ANSWER_CHARS], fault)
