"""`report.html`: its numbers are those of metrics.jsonl, and no text of a model does anything in it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.evaluation.accuracy import accuracy, difference
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import STARTS_FILE, StartLine, note_start, write_format
from prefixrl.common.run.documents import MetricsLine
from prefixrl.deploy.runs.report import gain_in_words, print_table, write_report
from prefixrl.deploy.runs.report_page import FOLDER, page
from prefixrl.learner.run import summary
from prefixrl.learner.run.summary import EvaluationOutcome
from support.fakes import document
from support.messages import evaluated
from support.runs.metrics_lines import metrics_line, write_metrics
from support.runs.small_disk import small_disk

HOSTILE = "</td></script><!--<script>alert(1)</script>\x1b[2J\u202egnp.exe\x07<img src=x onerror=alert(2)>]]>"


def line(iteration: int) -> MetricsLine:
    usual = metrics_line(iteration)
    more = {
        "rows": 8.0,
        "entropy": 1.0 / (1 + iteration),
        "actor_grad_norm": 0.1 * iteration,
        "reference_kl": 0.01 * iteration,
    }
    more |= {"old_ess_fraction": 0.9, "commonest_text_fraction": 0.5} if iteration else {}
    speeds = {"rollout": 100.0 + iteration, "scorer": 50.0, "learner": 5000.0}
    return msgspec.structs.replace(usual, figures=usual.figures | more, tokens_per_s=speeds)


LINES = [line(n) for n in range(20)]


class Tags(HTMLParser):
    """Everything that a browser would make an element of, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in self.texts and data.strip():
            self.texts[self.found[-1][0]].append(data)


def held(text: str) -> dict[str, Any]:
    """The message in a page."""
    result: dict[str, Any] = json.loads(
        next(each for each in Tags(text).texts["script"] if each.startswith("{"))
    )
    return result


def report(directory: Path) -> dict[str, Any]:
    """The parts of the one run in its report."""
    write_report(directory)
    (parts,) = held((directory / "report.html").read_text()).values()
    assert isinstance(parts, dict)
    return parts


def test_the_numbers_of_the_page_are_those_of_the_metrics(tmp_path: Path) -> None:
    write_format(tmp_path)
    write_metrics(tmp_path, LINES)
    curves = report(tmp_path)["curves"]
    written = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert curves["iteration"] == [each["iteration"] for each in written]
    actual = curves["mean"]
    for name in ("reward", "entropy", "actor_grad_norm", "reference_kl", "old_ess_fraction"):
        assert actual[f"figures/{name}"] == [each["figures"].get(name) for each in written]
    assert actual["mean_age"] == [each["mean_age"] for each in written]
    assert actual["largest age"] == [max(map(float, each["ages"])) for each in written]
    for name in ("busy_fraction", "tokens_per_s"):
        for role in written[0][name]:
            assert actual[f"{name}/{role}"] == [each[name][role] for each in written]


def test_a_report_that_finds_no_room_leaves_the_one_before_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        write_metrics(disk.path, LINES)
        write_format(disk.path)
        write_report(disk.path)
        before = (disk.path / "report.html").read_text()
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_report(disk.path)
        assert (disk.path / "report.html").read_text() == before and not list(
            disk.path.glob(".report*")
        )


@pytest.mark.parametrize("text", [HOSTILE, "</script>", "<!--", "\u2028'\"\\"])
def test_a_text_in_the_page_makes_no_element_and_comes_back_as_it_was(text: str) -> None:
    hostile = page({text: {"samples": [text]}})
    assert [tag for tag, _ in Tags(hostile).found] == [
        tag for tag, _ in Tags(page({"a": {}})).found
    ]
    assert held(hostile) == {text: {"samples": [text]}}


def test_the_page_needs_nothing_from_outside_and_runs_only_its_own_scripts() -> None:
    shown = Tags(page({}))
    assert not [
        tag for tag, attributes in shown.found if {"src", "onclick", "onload"} & attributes.keys()
    ]
    assert [each["href"] for tag, each in shown.found if "href" in each] == ["data:,"]
    (policy,) = (
        str(each["content"]) for tag, each in shown.found if tag == "meta" and "http-equiv" in each
    )
    assert (
        policy.startswith("default-src 'none'; ")
        and "unsafe" not in policy
        and "http" not in policy
    )
    digests = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for kind in ("script", "style")
        for each in shown.texts[kind]
        if not each.startswith("{")
    ]
    assert len(digests) == 8 and all(f"'sha256-{each}'" in policy for each in digests)
    names = {
        str(each.get("name")): each.get("content") for tag, each in shown.found if tag == "meta"
    }
    assert "width=device-width" in str(names["viewport"]) and names["color-scheme"] == "light dark"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_no_script_makes_markup_of_a_text(path: Path) -> None:
    used = re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function",
        path.read_text(),
    )
    assert used == [] and "</script" not in path.read_text()


def test_page_and_table_name_the_alarms_that_rang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_format(tmp_path)
    said = "the adapter writes one and the same text in 95% of the rows, whatever is asked <b>"
    ringing = {"one_text": said}
    write_metrics(
        tmp_path,
        [*LINES[:5], *(msgspec.structs.replace(each, alarms=ringing) for each in LINES[5:8])],
    )
    assert report(tmp_path)["alarms"] == [{"kind": "one_text", "first": 5, "last": 7, "text": said}]
    print_table(tmp_path)
    assert f"ALARM, iterations 5 to 7: {said}" in capsys.readouterr().out


def test_a_start_of_the_learner_is_noted_with_its_software(tmp_path: Path) -> None:
    for iteration in (0, 20):
        note_start(tmp_path, iteration)
    actual = [
        msgspec.json.decode(each, type=StartLine)
        for each in (tmp_path / STARTS_FILE).read_bytes().splitlines()
    ]
    assert [each.iteration for each in actual] == [0, 20]
    assert (
        actual[0].packages["prefixrl"]
        and actual[0].packages["torch"]
        and actual[0].time.endswith("+00:00")
    )
    assert re.fullmatch(r"([0-9a-f]{40}\+?)?", actual[0].commit)


def test_the_page_compares_the_arms_of_the_run_problem_by_problem_under_the_names_of_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_format(tmp_path)
    write_metrics(tmp_path, LINES)
    (tmp_path / "evaluations").mkdir()
    arms = {}
    for arm, right in (("no_prefix", 4), ("untrained_adapter", 4), ("trained_adapter", 14)):
        rows = [evaluated(str(n), float(n < right)) for n in range(20)]
        rows = [
            msgspec.structs.replace(each, version=20 * arm.startswith("trained")) for each in rows
        ]
        json_lines.write(tmp_path / f"evaluations/{arm}.greedy.jsonl", rows)
        actual = accuracy(rows)
        assert actual
        arms[arm] = {"greedy": actual}
    over = document(iteration=20, total_iterations=20)
    summary.write(summary.summarise(over, EvaluationOutcome(arms), LINES, 20, 9.0), tmp_path)
    shown = report(tmp_path)["page"]
    # Ten better, none worse: a chance of 2 in 2^10.
    figures = ["+0.500", "+0.228 to +0.681", "10", "0", "20", "0.00195"]
    assert ["greedy", "adapter@20", "no_prefix", *figures] in shown["tables"][-1][-1]
    assert shown["tables"][0][-1][-1][:2] == [
        "adapter@20",
        "0.700",
    ] and "trained_adapter" not in json.dumps(shown)
    assert [point["accuracy"] for point in shown["judged"]] == [0.2, 0.7]
    assert shown["gain"].startswith(
        "a gain: adapter@20 less adapter@0 is +0.500 (95% interval +0.228 to +0.681; by chance"
    )
    print_table(tmp_path)
    assert shown["gain"] in capsys.readouterr().out


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_a_gain_is_claimed_only_where_neither_interval_nor_sign_test_admits_chance(
    pairs: list[tuple[bool, bool]],
) -> None:
    after, before = ({str(n): float(pair[side]) for n, pair in enumerate(pairs)} for side in (0, 1))
    actual, back = difference(after, before), difference(before, after)
    assert actual and back
    said, turned = gain_in_words(actual, 9), gain_in_words(back, 9)
    is_shown = actual.chance <= 0.05 and not actual.ci95[0] <= 0.0 <= actual.ci95[1]
    assert said.startswith(("a gain: ", "a loss: ") if is_shown else "no gain shown: ")
    assert is_shown == ("prefixrl docs your_own_task" not in said)
    assert (said[:6], turned[:6]) in (("a gain", "a loss"), ("a loss", "a gain")) or not is_shown
