"""`python -m prefixrl.scorer.trial PARENT_PID`: reward given answers as a scorer would; no broker, no engine.

TrialRequest on stdin ──▶ the judge of a scorer (children, or a server of rewards) ──▶ TrialOutcome on stdout

As many answers are under way as the judge takes at once, so that the time of a call has no queue in it.
"""

import os
import sys
import time
from collections import deque

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PrefixRLError
from prefixrl.common.evaluation.trials import TrialOutcome, TrialRequest, TriedAnswer, TriedReward
from prefixrl.common.host.process import die_with_parent
from prefixrl.common.run.digests import function_digest
from prefixrl.common.wire.messages.fields import encodable
from prefixrl.scorer.judging import Cut, cut_treatment
from prefixrl.scorer.start import verifier_of
from prefixrl.scorer.verifier.exchange import AnswerFacts
from prefixrl.scorer.verifier.pool_thread import JudgeThread
from prefixrl.scorer.verifier.rules.verify import Judgement

LOOK_S = 0.001
"""Time between two looks for verdicts."""


def rewards_of(request: TrialRequest) -> list[list[TriedReward]]:
    """Return the verdicts by call; raises ConfigError or PeerLost."""
    config = from_json(request.config, "the trial's config")
    if config.reward.function is not None:
        # A child would end with a stack trace.
        user_function.check_call(user_function.PLUGGED_IN, config.reward.function)
    judge = verifier_of(config, function_digest(config.reward.function))
    cut, seats = cut_treatment(config), _seats(config)
    return [_judged_once(judge, request.answers, cut, seats) for _ in range(request.calls)]


def _seats(config: RunConfig) -> int:
    """Return the number of answers that the judge works on at once."""
    if config.reward.url is not None:
        return config.reward.requests
    return config.verifier_children(len(os.sched_getaffinity(0)))


def _judged_once(
    judge: JudgeThread, answers: list[TriedAnswer], cut: Cut, seats: int
) -> list[TriedReward]:
    verdicts: dict[int, TriedReward] = {}
    waiting = deque(enumerate(answers))
    begun_s: dict[int, float] = {}
    while waiting or begun_s:
        while waiting and len(begun_s) < seats:
            number, answer = waiting.popleft()
            if answer.is_cut and cut in ("zero", "mask"):
                status = "truncated" if cut == "mask" else "no_answer"
                verdicts[number] = TriedReward(reward=0.0, status=status)  # type: ignore[arg-type]
                continue
            begun_s[number] = time.monotonic()
            facts = AnswerFacts(
                tokens=answer.tokens,
                finish="length" if answer.is_cut else "stop",
                prefix=encodable(answer.prefix),
                source=answer.source,
                is_zero_if_cut=cut == "ask",
            )
            judge.submit(number, answer.text, answer.gold, answer.question, answer.code, facts)
        for number, judged in judge.poll():
            verdicts[number] = _tried(judged, time.monotonic() - begun_s.pop(number))
        time.sleep(LOOK_S * bool(begun_s))
    return [verdicts[number] for number in range(len(answers))]


def _tried(judged: Judgement, elapsed_s: float) -> TriedReward:
    return TriedReward(
        reward=judged.reward,
        status=judged.status,
        extracted=encodable(judged.extracted or ""),
        fault=judged.fault,
        rule=judged.rule,
        parts=judged.parts,
        elapsed_s=elapsed_s,
    )


def main() -> None:
    """Reward the answers on stdin."""
    die_with_parent(int(sys.argv[1]))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    # A user's file may print where it is imported: only the outcome may stand on stdout.
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        outcome = TrialOutcome(rewards_of(request))
    except PrefixRLError as error:
        outcome = TrialOutcome([], str(error), error.exit_code)
    with os.fdopen(results, "wb") as file:
        file.write(msgspec.json.encode(outcome))
    # The judge's thread and its children end with this process.
    os._exit(0)


if __name__ == "__main__":
    main()
