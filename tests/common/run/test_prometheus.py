"""Prometheus reads the numbers of a process: of the learner those of metrics.jsonl, of a worker its vitals."""

import contextlib
import http.client
import math
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from prefixrl.common.config.learner import LogConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.run import prometheus
from prefixrl.common.run.documents import columns
from prefixrl.common.run.prometheus import Number, exposed, numbers_of_run, port_of, text_of
from prefixrl.common.worker.numbers import numbers_of_worker
from support.fakes import free_pair
from support.runs.metrics_lines import metrics_line, write_metrics

LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")


def read(port: int, path: str = "/metrics") -> dict[tuple[str, str], float]:
    """Name and labels of every number that an endpoint serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parsed(answer.read().decode())


def parsed(text: str) -> dict[tuple[str, str], float]:
    results = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            results[match.group(1), match.group(2) or ""] = float(match.group(3))
    return results


def wanted() -> LogConfig:
    return LogConfig(prometheus_port=free_pair())


def test_the_learner_serves_the_columns_of_the_newest_iteration(tmp_path: Path) -> None:
    ringing = msgspec.structs.replace(metrics_line(1), alarms={"one_text": "it has collapsed"})
    with exposed(wanted(), "learner", lambda: numbers_of_run(tmp_path)) as port:
        of_process = read(port)
        assert of_process.pop(("prefixrl_info", f'role="learner",run="{tmp_path.name}"')) == 1.0
        assert {name for name, _ in of_process} == {"prefixrl_memory_bytes"}
        write_metrics(tmp_path, [metrics_line(0)])
        first = read(port)
        write_metrics(tmp_path, [metrics_line(0), ringing])
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"iteration": 2, "fig')  # being written
        content = read(port)
    for name, value in columns(ringing).items():
        head, _, rest = name.partition("/")
        assert content[f"prefixrl_{head}", f'of="{rest}"' if rest else ""] == value
    assert len(content) == len(columns(ringing)) + len(of_process) + 2
    alarm = ("prefixrl_alarm", 'of="one_text"')
    assert content[alarm] == 1.0 and alarm not in first and first["prefixrl_iteration", ""] == 0.0


def test_a_worker_serves_its_vitals(tmp_path: Path) -> None:
    from prefixrl.common.config.run import RunConfig
    from prefixrl.common.worker.link import Link
    from support.fakes import address_of, run_on_disk, serving

    config: RunConfig = run_on_disk(tmp_path)
    with serving(config):
        link = Link(lambda: address_of(config), "scorer")
        link.vitals.tokens, link.vitals.busy_row_s, link.vitals.activity = 12345, 6.5, "working"
        directory = Path(config.directory)
        with exposed(
            wanted(), "scorer-0", lambda: numbers_of_worker(link, "scorer", directory)
        ) as port:
            content = read(port, "/")
        link.close("done")
    assert content["prefixrl_info", 'role="scorer",run="run"'] == 1.0
    assert (
        0
        < content["prefixrl_memory_bytes", 'of="own"']
        <= content["prefixrl_memory_bytes", 'of="resident"']
    )
    assert content["prefixrl_worker_tokens", ""] == 12345.0
    assert content["prefixrl_worker_busy_row_seconds", ""] == 6.5
    assert content["prefixrl_worker_loading", ""] == 0.0


def test_odd_labels_and_values_are_written_as_the_text_format_has_them() -> None:
    odd = [
        Number("prefixrl_figures", 0.1, {"of": 'reward/a "quoted"\n\\source'}),
        Number("prefixrl_worker_tokens", 3.0, kind="counter"),
        Number("prefixrl_figures", math.nan, {"of": "kl"}),
        Number("prefixrl_speed", math.inf),
    ]
    assert text_of(odd).splitlines() == [
        "# TYPE prefixrl_figures gauge",
        'prefixrl_figures{of="reward/a \\"quoted\\"\\n\\\\source"} 0.1',
        'prefixrl_figures{of="kl"} NaN',
        "# TYPE prefixrl_worker_tokens counter",
        "prefixrl_worker_tokens 3.0",
        "# TYPE prefixrl_speed gauge",
        "prefixrl_speed +Inf",
    ]


def test_nothing_listens_unless_it_is_wanted_and_then_on_loopback_alone() -> None:
    with exposed(LogConfig(), "learner", lambda: []) as port:
        assert port == 0
    assert LogConfig().prometheus_host == "127.0.0.1"
    used = wanted()
    with exposed(used, "learner", lambda: []) as port, socket.socket() as other:
        assert port == used.prometheus_port
        outside = next((each for each in _addresses() if not each.startswith("127.")), None)
        if outside:
            other.settimeout(5.0)
            assert other.connect_ex((outside, port)) != 0
    with pytest.raises(urllib.error.URLError):
        read(port)


def _addresses() -> list[str]:
    with contextlib.suppress(OSError):
        return socket.gethostbyname_ex(socket.gethostname())[2]
    return []


def test_each_process_of_a_host_has_a_port_of_its_own() -> None:
    names = ("learner", "rollout-0", "rollout-3", "scorer-0", "scorer-12")
    assert [port_of(9400, name) for name in names] == [9400, 9401, 9404, 9501, 9513]


@pytest.mark.parametrize(
    ("name", "reason"), [("rollout-0", "Address already in use"), ("scorer-9", "must be 0-65535")]
)
def test_a_port_that_cannot_be_had_is_an_error_that_names_key_process_and_remedy(
    name: str, reason: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        base = other.getsockname()[1] - 1 if name == "rollout-0" else 65500
        with (
            pytest.raises(ConfigError) as caught,
            exposed(LogConfig(prometheus_port=base), name, lambda: []),
        ):
            pass
    said = str(caught.value)
    assert f"log.prometheus_port = {base}: {name} cannot listen at 127.0.0.1:" in said
    assert reason in said and "choose another port" in said and "or 0 for none" in said


def test_a_client_that_says_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_S", 0.2)
    with exposed(wanted(), "learner", lambda: [Number("prefixrl_iteration", 3.0)]) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            silent.sendall(b"GET /metr")
            assert read(port) == {("prefixrl_iteration", ""): 3.0}
            silent.settimeout(10.0)
            assert silent.recv(100) == b"", "the endpoint has hung up"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/other")
        assert connection.getresponse().status == 404
        connection.close()
