"""A scorer's verdicts on rows that a served target did or did not complete."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefixrl.common.engines.interface.base import Continuation, JobResult
from prefixrl.common.prompts.rendering import ByteRenderer
from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.worker import ModelDigests, Scores, ScoreTask, Usage
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support.broker.dispatch_desk import Desk
from support.broker.scoring_world import Tasks, WritingEngine, check_scores
from support.fakes import run_on_disk

USAGE = Usage(requests=4, prompt_tokens=40, completion_tokens=20, retries=1, limited_s=0.0)
RIGHT = r"\boxed{1}"


class ServedEngine(WritingEngine):
    """Completes the first row in text, has no completion for the second, and waits a turn before that."""

    usage = USAGE  # type: ignore[assignment]
    turns = 0

    @property
    def waits_for(self) -> str:
        return "http://there for 3 s: 503" if self.turns == 1 else ""

    def step(self, timeout_s: float) -> list[JobResult]:
        self.turns += bool(self._open)
        return super().step(timeout_s) if self.turns > 1 else []

    def _rows(self, job: Any) -> list[Continuation]:
        nothing = np.zeros(0, np.float32)
        read = ByteRenderer().encode("read otherwise")
        good = Continuation(read, nothing, "eos", (), text=RIGHT)
        lost = Continuation(read[:0], nothing, "error", (), error="the endpoint: 400 too long")
        return [good, lost] * (len(job.rows) // 2)


class WatchedTask(Tasks):
    """A link that notes the figures of the work loop."""

    states: list[tuple[str, str]]

    def receive(self, timeout_s: float) -> Any:
        self.states = [*getattr(self, "states", []), (self.vitals.activity, self.vitals.state)]
        return super().receive(timeout_s)


def test_a_row_without_a_completion_has_no_verdict_and_the_text_of_the_others_is_the_endpoints(
    tmp_path: Path,
) -> None:
    config = run_on_disk(
        tmp_path,
        scorer={"engine": "simulated", "keep_completions": True},
        rollout={"engine": "simulated"},
    )
    desk = Desk(config)
    rollout, worker = desk.worker("rollout"), desk.worker("scorer")
    desk.sample_everything(rollout)
    desk.dispatch()
    task: ScoreTask = desk.tasks(worker, ScoreTask)[0]
    task = msgspec.structs.replace(task, sampling=Sampling(temperature=0.0, max_new_tokens=20))
    groups = tuple(
        msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, gold="1"))
        for group in task.groups
    )
    link = WatchedTask(msgspec.structs.replace(task, groups=groups))
    engine, pool = ServedEngine([], 1), VerifierPool(1, 5)
    scorer = Scorer(config, link, engine, ByteRenderer(), pool, ModelDigests("", "", ""))  # type: ignore[arg-type]
    try:
        scorer.run(lambda: False)
    finally:
        pool.close()
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    for group in scores.groups:
        check_scores(group, 2)
        right, lost = group.verdicts
        assert (right.status, right.reward) == ("ok", 1.0) and right.completion.endswith(RIGHT)
        assert (lost.status, lost.fault, lost.finish) == ("error", "no completion", "error")
        assert lost.extracted == "the endpoint: 400 too long" and not lost.is_judged
        assert group.faults == {"no completion": 1}
    assert link.vitals.usage == USAGE
    assert ("waiting", "waiting for http://there for 3 s: 503") in link.states
    assert (link.vitals.activity, link.vitals.state) == ("working", "scoring")
