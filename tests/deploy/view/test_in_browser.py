"""The page in a real browser: it advances with its run, texts stay texts, it fits a phone, nothing is amiss."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE
from prefixrl.deploy.runs.report_page import page
from support.fakes import wait_until
from support.models.tiny_model import save_model
from support.runs.metrics_lines import metrics_line
from support.runs.runs_on_disk import held, made

pytestmark = [pytest.mark.browser, pytest.mark.proof]

CHECKS, FLAGS = (
    Path(__file__).with_name("browser.js").read_text(),
    ["--no-sandbox", "--disable-dev-shm-usage"],
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e"
SHOWN = HOSTILE.replace("\u202e", "\\u202e")


@contextmanager
def opened(url: str) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """A page on a phone, dark, and what asks it by a name of browser.js; it says nothing on its console."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed here: `make proofs` installs it (apt, root)"
    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=chromium, args=FLAGS) as browser,
    ):
        tab, said = (
            browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark"),
            list[str](),
        )
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(url)
        yield (
            tab,
            lambda name, *given: tab.evaluate(f"(given) => ({CHECKS})[{name!r}](...given)", given),
        )
        assert said == []


def test_a_page_advances_with_its_run_and_is_told_of_a_resume(
    dashboard: Callable[..., AbstractContextManager[str]], tmp_path: Path
) -> None:
    name = HOSTILE.replace("/", "")
    run = made(tmp_path / "runs" / name, save_model(tmp_path / "adapter"), 4)
    with dashboard(tmp_path / "runs") as address, opened(address) as (tab, ask):
        tab.locator("td a").click()
        wait_until(
            lambda: tab.locator("h1 .chip").count() and ask("chip") == "killed", "the state", 120.0
        )
        assert (
            ask("figure", "Reward") == ["reward 0.28", 1]
            and tab.locator("h1").inner_text() == f"{SHOWN.replace('/', '')} killed"
        )
        with held(run):
            line = metrics_line(4, reward=0.5)
            line.figures["reward_part/form"] = 0.75
            json_lines.append(run / METRICS_FILE, [line])
            wait_until(
                lambda: ask("figure", "Reward")[0] == "reward 0.54" and ask("chip") == "running",
                "the advance",
            )
        assert ask("widths") == [400, 400] and ask("planted") == 0
        drawn = ask("drawn")
        assert {"Reward", "Reward parts", "Age"} < set(
            drawn
        ) and "KL" not in drawn  # it has no reference


def test_the_texts_in_a_report_are_texts(tmp_path: Path) -> None:
    sample = dict.fromkeys(
        ("question", "prefix", "gold", "extracted", "status", "completion"), HOSTILE
    )
    sample |= {"reward": 1, "advantage": 0.5, "iteration": 3, "completion": f"{HOSTILE} and more"}
    common = {"first": 0, "last": 3, "text": HOSTILE, "share": 0.5, "reward": 0.5}
    judged = sample | {"extracted": "", "status": "ok", "parts": "form 0.75"}
    parts = {
        "samples": {"groups": [["Newest", [sample, judged]]], "common": [common], "fault": HOSTILE},
        "alarms": [common | {"kind": "ess"}],
    }
    (tmp_path / "report.html").write_text(
        page({HOSTILE: parts | {"state": {"state": "", "words": HOSTILE}}})
    )
    with opened(f"file://{tmp_path}/report.html") as (tab, ask):
        assert ask("marked") == [SHOWN] * 2 and ask("alarms") == [f"iterations 0–3: {SHOWN}"]
        assert (
            "iteration 3, form 0.75" in (text := tab.locator(".samples").inner_text())
            and "nothing" not in text
        )
        assert ask("planted") == 0 and ask("widths") == [400, 400]
