"""The second task: prefixes reach the target as text, runs say what became of them."""

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import aged_run
from benchmarks.aged_run import Target
from benchmarks.openings.arms import RUN_FILE, Iteration, Outcome, Setting, Size, config_of, run_arm
from prefixrl.common.engines.embedded.fixed_rows import FixedRowsEngine
from prefixrl.common.engines.interface.base import Job, JobResult
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.packing import pack_tokens
from prefixrl.deploy.examples.letters.problems import OPERATIONS
from support.models.tiny_model import DEEPSPEED_WARNINGS
from support.paths import EXAMPLES

pytestmark = DEEPSPEED_WARNINGS

SIZE = Size(
    (1,), iterations=3, heldout=8, evaluate_every=2, changes=("algorithm.groups_per_iteration=4",)
)


def test_a_prefix_reaches_the_target_as_text_and_a_verdict_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Job] = []
    run = aged_run._run

    def watched(engine: FixedRowsEngine, job: Job) -> JobResult:
        asked.append(job)
        return run(engine, job)

    monkeypatch.setattr(aged_run, "_run", watched)
    target = Target(config_of(RUN_FILE, Setting(0), 1, SIZE))
    pieces, characters = (
        AutoTokenizer.from_pretrained(EXAMPLES / "letters" / name) for name in ("adapter", "target")
    )
    prompt, opening = Prompt("id", "sort dbca", "abcd"), OPERATIONS[3].opening
    ids = [*pieces.encode(opening, add_special_tokens=False), pieces.eos_token_id]
    row = (prompt, pack_tokens(np.asarray(ids, dtype=np.int32)))
    first, again = target.verdicts([row, row])
    assert first is again is target.verdicts([row])[0]
    (job,) = asked
    (continued,) = job.rows
    assert characters.decode(continued.tolist()) == f"<user>sort dbca<assistant>{opening}"


@pytest.mark.parametrize("setting", [Setting(2), Setting(1, is_plain=True)])
def test_a_run_tells_what_became_of_it(setting: Setting) -> None:
    config = config_of(RUN_FILE, setting, 1, SIZE)
    outcome = run_arm("name", setting, config, SIZE, Target(config))
    assert (outcome.setting, outcome.seed) == ("name", 1)
    assert [version for version, _ in outcome.heldout] == [0, 2, 3]
    assert outcome.final == outcome.heldout[-1][1]
    assert len(outcome.spans) == 1 and outcome.spans[0].ess == pytest.approx(outcome.least_ess)
    assert outcome.least_ess < 0.99999 and outcome.least_ess_at > 0
    assert 0 < outcome.last.top_share <= 1 and outcome.last.entropy > 0


def told(*spans: tuple[float, float], top_share: float = 0.3) -> Outcome:
    """A run with these rewards and entropies."""
    results = [Iteration(reward, entropy, 1.0, 0.3) for reward, entropy in spans]
    last = msgspec.structs.replace(results[-1], top_share=top_share)
    return Outcome("", 1, [(0, 0.3), (30, 0.5)], results, 0, last, 1.0)


def test_collapsed_is_little_entropy_and_a_lost_reward_or_one_prefix_for_all() -> None:
    assert not told((0.3, 0.2), (0.9, 0.02)).is_collapsed
    assert not told((0.6, 0.2), (0.4, 0.2)).is_collapsed
    assert told((0.3, 0.2), (0.6, 0.1), (0.4, 0.02)).is_collapsed
    assert told((0.3, 0.2), (0.35, 0.04), top_share=1.0).is_collapsed
