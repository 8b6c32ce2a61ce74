"""A package that a stranger installs with pip adds a member at each seam, and a broken one is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.packages import write_package
from support.runs.run_helper import RUN_FILE, SMALL, check_books, finish, launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MEMBERS = {
    "objectives": "maxrl = prefixrl_extras:MAXRL",
    "engines": "counted = prefixrl_extras:COUNTED",
    "verifiers": "same_end = prefixrl_extras:SAME_END",
    "rewards": "brevity = prefixrl_extras:brevity",
    "trackers": "lines = prefixrl_extras:LINES",
    "commands": "hello = prefixrl_extras:hello",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package from its wheel."""
    folder = tmp_path_factory.mktemp("stranger")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "prefixrl_extras.py"):
        shutil.copy(Path(__file__).with_name(name), source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), source],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)],
        check=True,
    )
    return folder / "site"


def prefixrl(
    site: Path, *arguments: str, module: str = "deploy"
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", f"prefixrl.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_a_command_of_the_package_is_listed_and_runs(site: Path) -> None:
    assert "hello  A command of the package prefixrl-extras 1.2." in prefixrl(site, "--help").stdout
    assert prefixrl(site, "hello").stdout == "hello from a package\n"


def test_doctor_and_check_list_every_member_with_its_package(site: Path, tmp_path: Path) -> None:
    flags = ("--set", f"directory={tmp_path / 'run'}")
    doctor = prefixrl(site, "doctor", str(RUN_FILE), *flags)
    check = prefixrl(site, str(RUN_FILE), "--check", *flags, module="learner")
    assert doctor.returncode == check.returncode == 0, doctor.stderr + check.stderr
    for seam, member in MEMBERS.items():
        line = f"{seam}: {member} of prefixrl-extras 1.2"
        assert line in doctor.stdout and line in check.stdout


def test_a_run_takes_all_that_the_package_adds(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    directory = tmp_path / "run"
    settings = (
        *SMALL,
        "algorithm.name=maxrl",
        "algorithm.kl=0",
        "rollout.engine=counted",
        "rollout.engine_options={ limit = 3 }",
        "data.code=same_end",
        'log.trackers={ lines = { file = "lines.txt" } }',
        "algorithm.iterations=3",
        "evaluation.problems=8",
    )
    with launched(directory, *settings) as process:
        check_books(finish(process, directory), directory)
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {tuple(line["engines"]["rollout"]) for line in metrics} == {("counted",)}
    assert "counted engine; limit 3" in (directory / "logs/rollout-0.log").read_text()
    lines = (directory / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines if line[0].isdigit()][:3] == ["0", "1", "2"]
    assert lines[-1] == "end"
    groups = [
        json.loads(line)
        for line in prefixrl(site, "inspect", str(directory), "--json").stdout.splitlines()
    ]
    rules = {row["rule"] for group in groups for row in group["rows"]}
    assert rules == {"same_end"}
    config = json.loads((directory / "config.json").read_text())
    assert config["algorithm"]["name"] == "maxrl"


def test_a_reward_of_the_package_is_accepted_by_name(site: Path, tmp_path: Path) -> None:
    flags = ("--set", f"directory={tmp_path / 'run'}", "--set", "reward.function=brevity")
    check = prefixrl(site, str(RUN_FILE), "--check", *flags, module="learner")
    assert check.returncode == 0 and '"function": "brevity"' in check.stdout


@pytest.mark.parametrize(
    ("seam", "source", "words"),
    [
        pytest.param("engines", "import nothing_of_that_name", "ModuleNotFoundError", id="import"),
        pytest.param("objectives", "MEMBER = 3", "is 3; expected a ObjectiveRecord", id="class"),
        pytest.param("trackers", "", "has no attribute 'MEMBER'", id="attribute"),
    ],
)
def test_a_broken_package_is_named_and_ends_the_check(
    seam: str, source: str, words: str, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write_package(site, "broken", f"[prefixrl.{seam}]\nbad = broken:MEMBER\n", source)
    flags = ("--set", f"directory={tmp_path / 'run'}")
    doctor = prefixrl(site, "doctor", str(RUN_FILE), *flags)
    check = prefixrl(site, str(RUN_FILE), "--check", *flags, module="learner")
    assert (doctor.returncode, check.returncode) == (2, 2)
    for output in (doctor.stdout, check.stderr):
        assert f"broken 1.0 adds 'bad' to prefixrl.{seam}" in output and words in output
