"""`prefixrl logs`: which logs, which lines, and those that come."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands import logs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    for name in ("learner", "scorer-0", "scorer-1", "scorer-10"):
        (tmp_path / f"logs/{name}.log").write_text(
            "".join(f"{name} line {number}\n" for number in range(50))
        )
    return tmp_path


def printed(*arguments: str | Path) -> list[str]:
    result = CliRunner().invoke(main, ["logs", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_process_has_one_log_and_a_role_those_of_all_its_processes(run: Path) -> None:
    assert printed(run, "scorer-1", "-n", "2") == ["scorer-1 line 48", "scorer-1 line 49"]
    for role in ("scorer", "scorers"):
        assert [line for line in printed(run, role, "-n", "1") if line.startswith("==")] == [
            f"== {run}/logs/{name}.log" for name in ("scorer-0", "scorer-1", "scorer-10")
        ]
    assert len(printed(run)) == 4 * (20 + 1)


def test_a_name_without_a_log_is_refused_with_the_names_there_are(
    run: Path, tmp_path_factory: pytest.TempPathFactory
):
    refused = CliRunner().invoke(main, ["logs", str(run), "broker"])
    assert (
        refused.exit_code == 2 and "it has learner, scorer-0, scorer-1, scorer-10" in refused.output
    )
    refused = CliRunner().invoke(main, ["logs", str(tmp_path_factory.mktemp("empty"))])
    assert refused.exit_code == 2 and "holds no log" in refused.output


def test_a_log_is_followed_line_by_line_also_when_it_is_gone_and_begins_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.0)
    path = run / "logs/learner.log"
    steps = iter(["half a", " line\n", "more\n", None, "a new file\n"])
    seen: list[str] = []

    def stopped() -> bool:
        step = next(steps, "end")
        if step is None:
            path.unlink()
        elif step != "end":
            with path.open("a") as file:
                file.write(step)
        return step == "end"

    seen += logs.follow([path], 1, stopped)
    assert seen == ["learner line 49", "half a line", "more", "a new file"]


@pytest.mark.parametrize("count", [0, 1, 7, 5000, 20000])
def test_the_newest_lines_of_a_long_log_are_those_of_the_whole_file(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "long.log"
    path.write_text("".join(f"{number} {'x' * (number % 37)}\n" for number in range(10_000)))
    assert list(logs.newest_lines([path], count)) == (
        path.read_text().splitlines()[-count:] if count else []
    )
