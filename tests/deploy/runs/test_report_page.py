"""`report.html`: its numbers are those of metrics.jsonl, and no text of a model does anything in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.evaluation.accuracy import accuracy
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import STARTS_FILE, StartLine, note_start, write_format
from prefixrl.common.run.documents import AlarmSpan, MetricsLine, columns
from prefixrl.deploy.runs.report import print_table, write_report
from prefixrl.deploy.runs.report_page import Figure, PageContent, figures, page, picture_of, smoothed
from prefixrl.deploy.runs.samples import Common, SampleText
from prefixrl.learner.run import summary
from prefixrl.learner.run.summary import EvaluationOutcome
from support.fakes import document
from support.messages import evaluated
from support.runs.metrics_lines import metrics_line, write_metrics
from support.runs.small_disk import small_disk

HOSTILE = "</td></script><script>alert(1)</script>\x1b[2J\u202egnp.\u200fexe\x07<img src=x onerror=alert(2)>"


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


def sample(text: str) -> SampleText:
    return SampleText(
        iteration=3, group=1, prompt_id=text, question=text, gold=text, prefix=text, completion=text, extracted=text,
        status="ok", reward=1.0, advantage=0.25,
    )  # fmt: skip


def content(text: str = "fine") -> PageContent:
    return PageContent(
        title=text, state=text, lines=LINES, judged=(), tables=[(text, text, ((text, "b"), [[text, "1"]]))],
        facts=[("best fixed prefix", text)], alarms=[AlarmSpan("one_text", 4, 9, text)], early=[sample(text)],
        late=[sample(text)], common=[Common(0, 9, text, 0.5, 0.25)], no_samples="",
        starts=[StartLine(time="t", iteration=0, host=text, python="3", packages={"torch": "2"}, commit="abc")],
        config=json.dumps({"adapter": text}),
    )  # fmt: skip


class Tags(HTMLParser):
    """Everything that a browser would make an element of, and what is in tables without a box."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[dict[str, str | None]] = []
        self.boxes: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "div":
            self.open.append(dict(attrs))
        if tag == "table":
            self.boxes.append(self.open[-1].get("class") if self.open else None)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self.open.pop()


def tags(text: str) -> Tags:
    parser = Tags()
    parser.feed(text)
    return parser


def series_of(text: str) -> dict[str, list[float | None]]:
    match = re.search(r'<script type="application/json" id="series">(.*?)</script>', text)
    assert match
    found: dict[str, list[float | None]] = json.loads(match.group(1))
    return found


def test_the_numbers_of_the_page_are_those_of_the_metrics(tmp_path: Path) -> None:
    write_format(tmp_path)
    write_metrics(tmp_path, LINES)
    write_report(tmp_path)
    found = series_of((tmp_path / "report.html").read_text())
    written = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found["iteration"] == [each["iteration"] for each in written]
    for name in ("reward", "entropy", "actor_grad_norm", "reference_kl", "old_ess_fraction"):
        assert found[f"figures/{name}"] == [each["figures"].get(name) for each in written]
    assert found["mean_age"] == [each["mean_age"] for each in written]
    assert found["largest age"] == [max(map(float, each["ages"])) for each in written]
    for name in ("busy_fraction", "tokens_per_s"):
        for role in written[0][name]:
            assert found[f"{name}/{role}"] == [each[name][role] for each in written]


def test_a_report_that_finds_no_room_leaves_the_one_before_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        write_metrics(disk.path, LINES)
        write_format(disk.path)
        write_report(disk.path)
        before = (disk.path / "report.html").read_text()
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_report(disk.path)
        assert (disk.path / "report.html").read_text() == before and not list(disk.path.glob(".report*"))


def test_what_is_drawn_stands_where_its_value_is() -> None:
    values = [0.0, 0.25, None, 1.0]
    drawn = picture_of(Figure("Reward", "", {"figures/reward": values}, is_share=True), [0, 1, 2, 3])
    path = re.search(r'class="raw c0" data-name="figures/reward" d="([^"]*)"', drawn)
    assert path
    places = [tuple(map(float, each)) for each in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.group(1))]
    top, bottom = 8.0, 178.0
    assert [round((bottom - up) / (bottom - top), 3) for _, up in places] == [0.0, 0.25, 1.0]
    assert places[0][0] == 46.0 and places[-1][0] == 432.0 and path.group(1).count("M") == 2


def test_the_thick_line_is_the_mean_of_the_newest_values() -> None:
    values = [float(n * n) for n in range(20)]
    slow = [sum(values[max(0, n - 7) : n + 1]) / len(values[max(0, n - 7) : n + 1]) for n in range(20)]
    assert smoothed(values) == pytest.approx(slow)
    assert smoothed([1.0, None, 3.0]) == [1.0, None, 2.0]


def test_the_page_has_a_picture_of_each_thing_that_is_looked_at() -> None:
    titles = [figure.title for figure in figures(LINES, ())]
    assert titles == [
        "Reward", "KL", "Entropy", "Texts", "Age", "Effective sample size", "Gradient norm", "Busy", "Throughput",
    ]  # fmt: skip
    names = [name for figure in figures(LINES, ()) for name in figure.series]
    assert set(names) - {"largest age"} <= {name for each in LINES for name in columns(each)}


def test_no_text_of_a_model_is_an_element_a_control_character_or_a_change_of_direction() -> None:
    fine, hostile = page(content()), page(content(HOSTILE))
    assert [tag for tag, _ in tags(hostile).found] == [tag for tag, _ in tags(fine).found]
    assert not set(hostile) & set("\x1b\x07\u202e\u200f")
    assert "&lt;script&gt;alert(1)" in hostile and "\\u202egnp.\\u200fexe" in hostile


def test_the_page_needs_nothing_from_outside_and_runs_nothing() -> None:
    found = tags(page(content())).found
    scripts = [attributes for tag, attributes in found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "series"}]
    assert not [tag for tag, attributes in found if {"src", "href", "onclick", "onload"} & attributes.keys()]
    policies = [each["content"] for tag, each in found if tag == "meta" and "http-equiv" in each]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    metas = {each.get("name"): each.get("content") for tag, each in found if tag == "meta"}
    assert "width=device-width" in str(metas["viewport"]) and metas["color-scheme"] == "light dark"


def test_every_table_scrolls_in_a_box_of_its_own() -> None:
    boxes = tags(page(content())).boxes
    assert len(boxes) == 6 and set(boxes) == {"wide"}
    assert ".wide{overflow-x:auto" in page(content())


def test_page_and_table_name_the_alarms_that_rang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_format(tmp_path)
    ringing = {"one_text": "the adapter writes one and the same text in 95% of the rows, whatever is asked <b>"}
    write_metrics(tmp_path, [*LINES[:5], *(msgspec.structs.replace(each, alarms=ringing) for each in LINES[5:8])])
    write_report(tmp_path)
    said = "the adapter writes one and the same text in 95% of the rows, whatever is asked"
    shown = (tmp_path / "report.html").read_text()
    assert f'data-alarm="one_text"><b>iterations 5 to 7</b>: {said} &lt;b&gt;' in shown
    print_table(tmp_path)
    assert f"ALARM, iterations 5 to 7: {said} <b>" in capsys.readouterr().out


def test_a_start_of_the_learner_is_noted_with_its_software(tmp_path: Path) -> None:
    for iteration in (0, 20):
        note_start(tmp_path, iteration)
    found = [msgspec.json.decode(each, type=StartLine) for each in (tmp_path / STARTS_FILE).read_bytes().splitlines()]
    assert [each.iteration for each in found] == [0, 20]
    assert found[0].packages["prefixrl"] and found[0].packages["torch"] and found[0].time.endswith("+00:00")
    assert re.fullmatch(r"([0-9a-f]{40}\+?)?", found[0].commit)


def test_the_page_compares_the_arms_of_the_run_problem_by_problem_under_the_names_of_eval(tmp_path: Path) -> None:
    write_format(tmp_path)
    write_metrics(tmp_path, LINES)
    (tmp_path / "evaluations").mkdir()
    arms = {}
    for arm, right in (("no_prefix", 4), ("untrained_adapter", 4), ("trained_adapter", 14)):
        rows = [evaluated(str(n), float(n < right)) for n in range(20)]
        json_lines.write(tmp_path / f"evaluations/{arm}.greedy.jsonl", rows)
        found = accuracy(rows)
        assert found
        arms[arm] = {"greedy": found}
    over = document(iteration=20, total_iterations=20)
    summary.write(summary.summarise(over, EvaluationOutcome(arms), LINES, 20, 9.0), tmp_path)
    write_report(tmp_path)
    shown = re.sub(r"<[^>]*>", " ", (tmp_path / "report.html").read_text())
    # Ten better, none worse: a chance of 2 in 2^10.
    assert "greedy adapter@20 no_prefix +0.500 +0.228 to +0.681 10 0 20 0.00195" in " ".join(shown.split())
    assert "adapter@20 0.700" in " ".join(shown.split()) and "trained_adapter" not in shown
