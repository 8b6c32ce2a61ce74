"""Messages with usual fields; a test names those that matter to it."""

from collections.abc import Sequence
from typing import Any

from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Sampling, Verdict
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.common.wire.messages.worker import ScoreTask

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)
HELD_OUT = Prompt("h", "?", "1")


def evaluate(name: str, version: int = 0, prompts: Sequence[Prompt] = (HELD_OUT,), **fields: Any) -> Evaluate:
    usual = {"prefix_tokens": b"", "prefix_sampling": GREEDY, "completion_sampling": GREEDY}
    return Evaluate(name=name, version=version, prompts=tuple(prompts), **usual | fields)


def score_task(*groups: GroupPrefixes, **fields: Any) -> ScoreTask:
    usual = {"task": "t", "kind": "train", "version": 0, "weights_digest": "d", "sampling": GREEDY, "sampled_s": 0.1}
    return ScoreTask(groups=groups, **usual | fields)


def verdict(reward: float = 1.0, **fields: Any) -> Verdict:
    usual = {"status": "ok", "extracted": "", "finish": "eos", "completion_tokens": 1, "elapsed_ms": 0}
    return Verdict(reward=reward, **usual | fields)
