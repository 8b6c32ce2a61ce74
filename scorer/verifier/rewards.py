"""A reward as functions, verifiers and servers of users give it: a number, or a dict of numbers."""

import logging
import math
from collections.abc import Mapping

from prefixrl.common.config.foreign import user_function
from prefixrl.common.wire.messages.fields import MOST_NAME_CHARS, encodable
from prefixrl.common.wire.messages.groups import MOST_PARTS
from prefixrl.scorer.verifier.complaints import Complaints
from prefixrl.scorer.verifier.rules.verify import Judgement

log = logging.getLogger(__name__)

REWARD = "reward"
"""Key of the reward in a dict; the other numbers are parts."""
_MOST_SHOWN_CHARS = 100

_complaints = Complaints(log)


def reward_of(result: object, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the reward and the parts in a result; the reward is NaN where the result holds none."""
    if not isinstance(result, Mapping):
        return math.nan if weights else user_function.number(result), {}
    parts = {
        encodable(str(name))[:MOST_NAME_CHARS]: user_function.number(part)
        for name, part in result.items()
    }
    if weights:
        weighted = [weight * parts.get(name, math.nan) for name, weight in weights.items()]
        # Rounded: three parts of 1.0 with weights of 0.7, 0.2 and 0.1 are a reward of 1, not a little more.
        reward = round(math.fsum(weighted), 12)
    else:
        reward = parts.pop(REWARD, math.nan)
    are_valid = len(parts) <= MOST_PARTS and all(map(math.isfinite, parts.values()))
    return reward if are_valid else math.nan, parts


def no_reward(result: object, weights: Mapping[str, float]) -> str:
    """Return a result that is no reward, and what a reward is, in words."""
    if weights:
        names = ", ".join(weights)
        first = f"with reward.weights a dict of {names}, whose weighted sum is from 0 to 1, and"
        limit = f"at most {MOST_PARTS} finite numbers by name"
    else:
        first = f"a finite number from 0 to 1, or a dict with such a `{REWARD}` and"
        limit = f"at most {MOST_PARTS} other finite numbers by name"
    return f"{result!r:.{_MOST_SHOWN_CHARS}}; a reward is {first} {limit}"


def scored_answer(judge: str, result: object, rule: str, weights: Mapping[str, float]) -> Judgement:
    """Return the verdict of a judge that returned a result; anything but a reward is an error with its reason."""
    reward, parts = reward_of(result, weights)
    if 0.0 <= reward <= 1.0:
        return Judgement(reward, "ok", None, parts=parts, rule=rule)
    reason = f"{judge} returned {no_reward(result, weights)}"
    if _complaints.is_first((judge, type(result).__name__), reason):
        log.warning("%s", reason)
    return Judgement(0.0, "error", reason, "function returned no reward")
