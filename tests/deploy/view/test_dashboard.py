"""`prefixrl dashboard`: numbers as in the files; what changes is told; nobody is let in who must not be."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE
from prefixrl.deploy.view import feed
from support.models.tiny_model import save_model
from support.runs.metrics_lines import metrics_line
from support.runs.runs_on_disk import finish, held, made

Dashboard = Callable[..., AbstractContextManager[str]]
KEY = "k" * 32
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that goes on in no process, and one whose name is markup."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    adapter = save_model(folder.parent / "adapter")
    finish(made(folder / "done", adapter, 10), 0.75)
    made(folder / "deep" / "open", adapter, 4)
    made(folder / HOSTILE.replace("/", "|"), adapter, 2)
    (folder / "done/logs").mkdir()
    (folder / "done/logs/learner.log").write_text("".join(f"line {n}\n" for n in range(99)))
    return folder


@pytest.fixture(scope="module")
def address(dashboard: Dashboard, folder: Path) -> Iterator[str]:
    with dashboard(folder) as result:
        yield result


def events(address: str, *names: str) -> Iterator[dict[str, Any]]:
    with httpx2.stream(
        "GET", f"{address}/api/follow", params=[("run", name) for name in names], timeout=30
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
        yield from (
            json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")
        )


@pytest.mark.slow
def test_every_run_of_the_folder_is_listed_and_its_numbers_are_those_of_its_files(
    folder: Path, address: str
) -> None:
    listed = {run["name"]: run for run in httpx2.get(f"{address}/api/runs").json()["runs"]}
    assert {name: run["state"] for name, run in listed.items()} == {
        "done": "finished",
        "deep/open": "killed",
        HOSTILE.replace("/", "|"): "killed",
    }
    message = next(events(address, "done", "deep/open"))
    for name in ("done", "deep/open"):
        written = [
            json.loads(line) for line in (folder / name / METRICS_FILE).read_text().splitlines()
        ]
        curves = message[name]["curves"]
        assert curves["mean"]["figures/reward"] == [each["figures"]["reward"] for each in written]
        assert curves["mean"]["mean_age"] == [each["mean_age"] for each in written]
    assert dict(message["done"]["page"]["settings"])["algorithm.clip"] == "0.2"
    logs = httpx2.get(f"{address}/api/logs", params={"run": "done"}).json()
    assert logs == {"learner": [f"line {n}" for n in range(59, 99)]}


@pytest.mark.slow
def test_a_viewer_is_told_what_changes_a_resume_and_a_line_that_was_trained_again(
    folder: Path, address: str
) -> None:
    run = folder / "deep" / "open"
    told = events(address, "deep/open")
    assert next(told)["deep/open"]["state"]["state"] == "killed"
    with held(run):
        json_lines.append(run / METRICS_FILE, [metrics_line(4)])
        message = next(told)["deep/open"]
        while "curves" not in message or message.get("state", {}).get("state") != "running":
            message |= next(told)["deep/open"]
        assert message["curves"]["from"] == 4 and message["curves"]["iteration"] == [4]
        assert "page" not in message
        json_lines.write(run / METRICS_FILE, [metrics_line(n, reward=0.5) for n in range(4)])
        while "curves" not in (message := next(told)["deep/open"]):
            pass
    assert message["curves"]["from"] == 0 and message["curves"]["mean"]["figures/reward"] == [
        0.5,
        0.51,
        0.52,
        0.53,
    ]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        pytest.param("/", {}, 200, id="the page"),
        pytest.param("/page.js", {}, 200, id="its script"),
        pytest.param("/", {"host": "localhost:1"}, 200, id="localhost by name"),
        pytest.param("/", {"host": "evil.org"}, 403, id="another host's name"),
        pytest.param("/api/runs", {"host": "evil.org"}, 403, id="data under another host's name"),
        pytest.param("/../report_page.py", {}, 404, id="a path outside"),
        pytest.param("/%2e%2e/report_page.py", {}, 404, id="an encoded path outside"),
        pytest.param("/api/logs?run=../..", {}, 404, id="logs outside"),
        pytest.param("/api/logs?run=done/../done", {}, 404, id="logs of a folder by detour"),
        pytest.param("/api/follow?run=/etc", {}, 404, id="an absolute folder"),
        pytest.param("/api/follow", {}, 404, id="no folder"),
        pytest.param("/api/logs?run=", {}, 404, id="an empty folder"),
    ],
)
def test_other_hosts_names_and_paths_outside_are_refused(
    address: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = httpx2.get(f"{address}{path}", headers=headers)
    assert answer.status_code == status
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; " in policy and "unsafe" not in policy
    assert httpx2.post(f"{address}/api/runs").status_code == 405


def test_with_a_key_only_who_has_it_is_let_in(dashboard: Dashboard, folder: Path) -> None:
    with dashboard(folder, "--key-variable", "DASHBOARD_KEY", DASHBOARD_KEY=KEY) as address:
        refused = [httpx2.get(address), httpx2.get(address, auth=("me", "wrong"))]
        assert [each.status_code for each in refused] == [401, 401] and "Basic" in refused[
            0
        ].headers["www-authenticate"]
        given = base64.b64encode(f"anybody:{KEY}".encode()).decode()
        for scheme in (f"Basic {given}", f"Bearer {KEY}"):
            assert (
                httpx2.get(
                    f"{address}/api/runs", headers={"authorization": scheme, "host": "a.b"}
                ).status_code
                == 200
            )


def test_one_reader_serves_all_viewers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LEAST_PAUSE_S", 1e6)
    monkeypatch.setattr(feed, "MOST_PAUSE_S", 1e6)

    async def view() -> None:
        shared = feed.Feed(folder / "done")
        first, seen = await shared.since(feed.SentParts())
        json_lines.append(folder / "done" / METRICS_FILE, [metrics_line(10)])
        assert await shared.since(feed.SentParts()) == (first, seen) and await shared.since(
            seen
        ) == (
            {},
            seen,
        )
        assert (await feed.Feed(folder / "done").since(feed.SentParts()))[1].rows == seen.rows + 1

    asyncio.run(view())
