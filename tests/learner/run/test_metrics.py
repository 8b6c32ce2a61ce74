"""The lines of a run outlive the learner: figures add up over learners that were killed and started again."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.errors import DataError
from prefixrl.common.run.documents import MetricsLine, Summary
from prefixrl.common.run.status import AdmissionStatus, StatusDocument
from prefixrl.common.wire.messages.groups import BatchGroup, StageTimes
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.deploy.runs.report import print_table
from prefixrl.deploy.view.console import Progress, details
from prefixrl.learner.run import summary
from prefixrl.learner.run.metrics import MetricsLog, Times
from prefixrl.learner.run.summary import EvaluationOutcome
from prefixrl.learner.training.figures import IterationMetrics
from support.fakes import document, worker_status

GROUP = BatchGroup(
    seq=0,
    prompt_id="p0",
    version=0,
    weights_digest="d0",
    lengths=((3, 2),),
    rewards=(1.0,),
    stages=StageTimes(0.0, 0.0, 0.0, 0.0),
    statuses={"ok": 1},
)
METRICS = IterationMetrics({"rows": 1.0}, {}, (0.5,), (), ())


def train(
    log: MetricsLog, iteration: int, since_start_s: float, status: StatusDocument, **measured: Any
) -> None:
    batch = Batch(iteration=iteration, total_iterations=3, seed=0, groups=(GROUP,), waited_s={})
    log.write(
        batch, METRICS, iteration + 1, Times(0.5, 1.0, since_start_s, 0.25, **measured), status
    )


def lines(directory: Path) -> list[MetricsLine]:
    return MetricsLog(directory, 9).lines()


def summarised(log: MetricsLog, status: StatusDocument, up_s: float) -> Summary:
    return summary.summarise(
        status, EvaluationOutcome(), log.lines(), 3, log.since_run_began_s(up_s)
    )


def test_the_time_of_a_run_goes_on_where_the_last_kept_line_of_a_killed_learner_stands(
    tmp_path: Path,
) -> None:
    status = document(worker_status("scorer", "vllm"))
    first = MetricsLog(tmp_path, 0)
    for iteration, since_start_s in enumerate((10.0, 12.0, 14.0)):
        train(first, iteration, since_start_s, status)
    second = MetricsLog(
        tmp_path, 2
    )  # the checkpoint was of iteration 2: the third line is not of this run any more
    train(second, 2, 5.0, status)
    assert [line.since_start_s for line in lines(tmp_path)] == [10.0, 12.0, 17.0]
    assert lines(tmp_path)[2].tokens_per_s["rollout"] == pytest.approx(2 / 5.0)
    assert second.since_run_began_s(6.0) == 18.0


def test_a_line_and_the_summary_say_how_old_samples_were_and_how_far_ahead_they_were_begun(
    tmp_path: Path,
) -> None:
    admission = AdmissionStatus(
        rule="just_in_time", lead_groups=40.0, cap_groups=64.0, waited_s=0.25
    )
    status = document(admission=admission, mean_age=1.25, age_histogram={"1": 3, "2": 1})
    log = MetricsLog(tmp_path, 0)
    train(log, 2, 10.0, status)
    (line,) = lines(tmp_path)
    assert (line.ages, line.mean_age, line.admission) == ({"2": 1}, 2.0, admission)
    ages = summarised(log, status, 13.0).staleness
    assert (ages.mean_trained, ages.max_trained, ages.admission) == (1.25, 2, "just_in_time")


@pytest.mark.parametrize("name", ["metrics.jsonl", "advantages.jsonl"])
def test_a_line_that_was_torn_by_a_crash_is_dropped_and_the_log_goes_on(
    tmp_path: Path, name: str
) -> None:
    first = MetricsLog(tmp_path, 0)
    train(first, 0, 10.0, document())
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole + whole[: len(whole) // 2])
    train(MetricsLog(tmp_path, 1), 1, 5.0, document())
    assert [line.iteration for line in lines(tmp_path)] == [0, 1]
    kept = (tmp_path / name).read_bytes().splitlines()
    assert [msgspec.json.decode(line)["iteration"] for line in kept] == [0, 1]


def test_a_damaged_line_before_the_last_is_a_named_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for iteration in range(2):
        train(log, iteration, 10.0, document())
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[20:])
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is damaged"):
        MetricsLog(tmp_path, 2)


def test_a_learner_that_finds_its_run_finished_tells_of_it_what_the_first_one_told(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    first = MetricsLog(tmp_path, 0)
    busy = document(
        worker_status("rollout", "vllm"),
        worker_status("scorer", "openai"),
        worker_status("scorer", ""),
        busy_fraction={"rollout": 0.75, "scorer": 0.5},
        losses={"scorer: lost": 2},
    )
    for iteration in range(3):
        train(first, iteration, 10.0 + iteration, busy)
    then = summarised(first, busy, 13.0)
    assert then.engine == {"rollout": "vllm", "scorer": "openai"}
    assert then.busy_fraction == {"rollout": 0.75, "scorer": 0.5, "learner": 0.25}
    assert then.wall_s == 13.0

    directory = tmp_path / "run"
    assert summary.merged(then, directory) == then, "there is none before it"
    long = msgspec.structs.replace(then, wall_s=60.0)  # it judged the last version for long
    summary.write(long, directory)
    again = summarised(MetricsLog(tmp_path, 3), document(worker_status("rollout", "")), 1.0)
    assert again.wall_s == 13.0
    assert summary.merged(again, directory) == long
    other = msgspec.structs.replace(again, run_id="another")
    assert summary.merged(other, directory) == other


def test_on_cuda_the_memory_of_a_rank_is_told_beside_its_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, peaks = (
        MetricsLog(tmp_path, 0, forecast={"forecast_gib": 62.5}),
        dict.fromkeys(["peak_reserved_gib/0"], 57.0),
    )
    train(log, 0, 10.0, document(), ranks=peaks | {"peak_reserved_gib/1": 60.0})
    (line,) = lines(tmp_path)
    assert line.ranks == {
        "peak_reserved_gib/0": 57.0,
        "peak_reserved_gib/1": 60.0,
        "forecast_gib": 62.5,
    }
    summary.write(summarised(log, document(), 13.0), tmp_path)
    print_table(tmp_path)
    told = "learner's memory: forecast 62.5 GiB per rank, measured at most 60.0, a ratio of 0.96"
    assert told in " ".join(capsys.readouterr().out.split())
    without = msgspec.structs.replace(line, ranks={"tokens_per_s/0": 900.0})
    shown = [
        dict(details(document(), Progress(each)))["learner's memory"] for each in (line, without)
    ]
    assert told.endswith(f": {shown[0]}") and shown[1] == ""


def test_every_engine_that_worked_for_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = MetricsLog(tmp_path, 0)
    train(log, 0, 1.0, document(worker_status("scorer", "transformers")))
    train(
        log,
        1,
        2.0,
        document(worker_status("scorer", "vllm"), worker_status("scorer", "transformers")),
    )
    train(log, 2, 3.0, document())
    assert summarised(log, document(), 3.0).engine == {"scorer": "transformers, vllm"}


def test_losses_that_a_restarted_broker_forgot_are_still_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = MetricsLog(tmp_path, 0)
    train(log, 0, 1.0, document(losses={"scorer: lost": 3, "rollout: lost": 1}))
    train(log, 1, 2.0, document(losses={"rollout: lost": 2}))
    actual = summarised(log, document(losses={"scorer: lost": 1, "scorer: left": 1}), 3.0)
    assert actual.losses == {"scorer: lost": 3, "rollout: lost": 2, "scorer: left": 1}


def test_alarms_stand_in_the_lines_while_they_ring_and_in_the_summary_as_spans(
    tmp_path: Path,
) -> None:
    log = MetricsLog(tmp_path, 0)
    for iteration, ess in enumerate((0.9, 0.4, 0.3, 0.8, 0.2)):
        batch = Batch(iteration=iteration, total_iterations=5, seed=0, groups=(), waited_s={})
        metrics = IterationMetrics({"rows": 1.0, "old_ess_fraction": ess}, {}, (), (), ())
        log.write(batch, metrics, iteration + 1, Times(0.5, 1.0, 2.0, 0.25), document())
    assert [set(line.alarms) for line in log.lines()] == [set(), {"ess"}, {"ess"}, set(), {"ess"}]
    assert (
        "effective sample size of tokens of age 1 and more is 0.30" in log.lines()[2].alarms["ess"]
    )
    spans = summarised(log, document(), 9.0).alarms
    assert [(each.kind, each.first, each.last) for each in spans] == [("ess", 1, 2), ("ess", 4, 4)]
    assert "is 0.40 of" in spans[0].text and "is 0.20 of" in spans[1].text
