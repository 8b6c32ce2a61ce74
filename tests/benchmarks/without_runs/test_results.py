"""The files that benchmarks write."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.results import ROOT, Report, commit, mean_figure, t_interval


def test_the_interval_of_three_values_is_students() -> None:
    mean, (low, high) = t_interval([1.0, 2.0, 4.0])
    # s = sqrt(7/3), t(2) = 4.303
    half = 4.303 * (7 / 3) ** 0.5 / 3**0.5
    assert mean == pytest.approx(7 / 3)
    assert (low, high) == pytest.approx((7 / 3 - half, 7 / 3 + half))


def test_one_value_has_no_interval_and_many_have_a_narrow_one() -> None:
    assert t_interval([0.25]) == (0.25, (0.25, 0.25))
    values = [float(i % 2) for i in range(40)]
    mean, (low, high) = t_interval(values)
    assert high - low == pytest.approx(2 * 2.262 * statistics.stdev(values) / 40**0.5)
    assert mean == 0.5


def test_a_figure_stands_against_its_baseline_and_has_no_ratio_without_one() -> None:
    figure = mean_figure("speed", "tokens/s", [20.0, 22.0], [10.0, 11.0], "one worker")
    assert (figure.value, figure.baseline, figure.ratio, figure.n) == (21.0, 10.5, 2.0, 2)
    alone = mean_figure("speed", "tokens/s", [20.0])
    assert (alone.baseline, alone.ratio) == (None, None)
    assert mean_figure("x", "", [1.0], [0.0]).ratio is None


def test_a_report_names_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "figures.json"
    Report(
        "speed", True, {"rows": 3}, [mean_figure("speed", "tokens/s", [1.0])], [], commit()
    ).write(path)
    document = json.loads(path.read_text())
    assert document["benchmark"] == "speed" and document["is_quick"]
    assert document["figures"][0]["unit"] == "tokens/s"
    assert {"cpu", "cores", "load", "torch"} <= document["machine"].keys()
    if (ROOT / ".git").exists():
        assert document["commit"] != "unknown"
