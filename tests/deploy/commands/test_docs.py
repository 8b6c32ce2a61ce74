"""`prefixrl docs`, `prefixrl completion`, and how soon the commands answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands import GROUPS
from support.paths import ROOT

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "README")


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_every_page_is_listed_with_its_question_and_printed_as_it_is() -> None:
    listed = [line.split(maxsplit=1) for line in cli("docs").output.splitlines()[2:]]
    assert [line[0] for line in listed] == PAGES and all(line[1].endswith("?") for line in listed)
    for topic in PAGES:
        assert cli("docs", topic).output == (ROOT / f"docs/{topic}.md").read_text()


def test_the_page_of_commands_has_the_groups_of_the_help() -> None:
    sections = (ROOT / "docs/commands.md").read_text().split("\n## ")
    page = {title: text for title, _, text in (section.partition("\n") for section in sections)}
    for title, group in GROUPS.items():
        assert group.keys() - set(re.findall(r"`prefixrl ([a-z-]+)", page[title])) == set()


def test_the_site_has_all_pages_and_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert (
        set(PAGES) - set(re.findall(r"(\w+)\.md", (ROOT / "docs/site/mkdocs.yml").read_text()))
        == set()
    )


def test_every_link_of_a_page_leads_to_a_file() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text())
    ]
    assert (
        len(links) > 100
        and [each for each in links if not (each[0].parent / each[1]).exists()] == []
    )


def test_an_unknown_page_is_refused_with_those_there_are() -> None:
    refused = cli("docs", "nothing")
    assert (
        refused.exit_code == 2
        and "there is no page 'nothing'" in refused.output
        and "staleness" in refused.output
    )


@pytest.mark.slow
def test_an_example_is_copied_out_of_the_package_and_stands_on_its_own(tmp_path: Path) -> None:
    assert "letters" in cli("example").output
    for name in ("arithmetic", "arithmetic_direct", "letters"):
        copy = tmp_path / name
        assert f"prefixrl launch {copy}/run.toml" in cli("example", name, str(copy)).output
        command = [sys.executable, "-m", "prefixrl.learner", str(copy / "run.toml"), "--check"]
        checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    build = "import build, problems; assert build.Problem is problems.Problem"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "letters", check=True)
    assert "is there already" in cli("example", "letters", str(copy)).output
    assert (
        "there is no example 'nothing'; there are: advice, arithmetic, "
        in cli("example", "nothing").output
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_clicks_script_for_this_command(shell: str) -> None:
    environment = os.environ | {"_PREFIXRL_COMPLETE": f"{shell}_source"}
    code = "from prefixrl.deploy.__main__ import main; main(prog_name='prefixrl')"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert cli("completion", shell).output.strip() == asked.stdout.strip() != ""


def test_a_shell_is_offered_the_commands() -> None:
    words = {"COMP_WORDS": "prefixrl st", "COMP_CWORD": "1", "_PREFIXRL_COMPLETE": "bash_complete"}
    code = "from prefixrl.deploy.__main__ import main; main(prog_name='prefixrl')"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True
    )
    assert {"plain,status", "plain,stop"} <= set(asked.stdout.split())


@pytest.mark.parametrize("arguments", [("--help",), ("config",), ("docs",), ("samples", "--help")])
def test_a_look_imports_no_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom prefixrl.deploy.__main__ import main\n"
        "main(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
