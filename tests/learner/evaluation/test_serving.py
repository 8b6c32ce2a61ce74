"""An evaluation beside a run that goes on takes none of its ports."""

from pathlib import Path

import msgspec

from prefixrl.common.evaluation.plans import PLAN_FILE, EvaluationPlan
from prefixrl.learner.commands.serving import read_plan
from support.fakes import run_on_disk


def test_what_judges_a_run_serves_no_numbers_at_the_ports_of_the_run(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path, log={"prometheus_port": 9400, "tensorboard": True})
    plan = EvaluationPlan(
        config=config.model_dump_json(), version=0, published=(), samples=0, label="r", kind="k", arms=(),
        opening_tokens=1,
    )  # fmt: skip
    (tmp_path / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
    read, mine = read_plan(tmp_path, EvaluationPlan)
    assert read == plan and mine.log.prometheus_port == 0 and not mine.log.tensorboard
