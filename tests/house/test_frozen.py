"""Commands, keys of the run file and options are frozen: a new one needs a decision record.

Each list is a file in `frozen/`. Lines before the first heading were there when the lists were frozen. A heading names
the decision record of the lines below it, and that record names each of them:

    # docs/decisions/031-why-it-is-needed.md
    algorithm.new_key
"""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from prefixrl.common.config import catalogue
from prefixrl.common.worker.command import worker_command
from prefixrl.deploy.__main__ import COMMANDS, main
from prefixrl.learner.__main__ import main as learner
from support.paths import ROOT

FROZEN = Path(__file__).parent / "frozen"
BASE = {"commands": 32, "keys": 283, "options": 114}
"""Lines before the first heading: they can only become fewer."""


def options_of(command: click.Command, name: str) -> Iterator[str]:
    """Yield `COMMAND --option` for every option of a command and its subcommands."""
    if isinstance(command, click.Group):
        for part in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), part)
            assert inner is not None
            yield from options_of(inner, f"{name} {part}")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield f"{name} {max(parameter.opts, key=len)}"


def all_options() -> set[str]:
    daemons = {
        "prefixrl-learner": learner,
        "prefixrl-rollout": worker_command("rollout", ""),
        "prefixrl-scorer": worker_command("scorer", ""),
    }
    options = {option for name in daemons for option in options_of(daemons[name], name)}
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        options |= set(options_of(command, f"prefixrl {name}"))
    return options


PRESENT = {
    "commands": lambda: set(COMMANDS),
    "keys": lambda: {setting.key for setting in catalogue.settings() if not setting.is_section},
    "options": all_options,
}


def faults_of(text: str, present: set[str], base: int, root: Path) -> list[str]:
    """Return what is wrong with a frozen list, line by line."""
    faults, frozen, record, before_headings = [], set[str](), "", 0
    for line in filter(None, text.splitlines()):
        if line.startswith("# "):
            path = root / line.removeprefix("# ")
            record = path.read_text(encoding="utf-8") if path.is_file() else ""
            faults += [] if record else [f"{line}: there is no such decision record"]
            continue
        frozen.add(line)
        before_headings += not record
        name = re.escape(line.split()[-1])
        if record and not re.search(rf"(?<![\w.-]){name}(?![\w-])", record):
            faults.append(f"{line}: its decision record does not name it")
    if before_headings > base:
        faults.append(f"{before_headings} lines without a decision record, {base} were frozen")
    faults += [f"{name}: new, and in no list" for name in sorted(present - frozen)]
    faults += [f"{name}: gone, take it out of the list" for name in sorted(frozen - present)]
    return faults


@pytest.mark.parametrize("kind", PRESENT)
def test_nothing_is_added_without_a_decision_record(kind: str) -> None:
    text = (FROZEN / f"{kind}.txt").read_text(encoding="utf-8")
    assert faults_of(text, PRESENT[kind](), BASE[kind], ROOT) == []


@pytest.mark.parametrize(
    ("text", "present", "fault"),
    [
        pytest.param("a\n", {"a", "b"}, "b: new, and in no list", id="a new key"),
        pytest.param("a\nb\n", {"a"}, "b: gone, take it out of the list", id="a key that is gone"),
        pytest.param(
            "a\nb\n", {"a", "b"}, "2 lines without a decision record, 1 were frozen", id="no record"
        ),
        pytest.param(
            "a\n# none.md\nb\n",
            {"a", "b"},
            "# none.md: there is no such decision record",
            id="no file",
        ),
        pytest.param(
            "a\n# why.md\nb\n",
            {"a", "b"},
            "b: its decision record does not name it",
            id="not named",
        ),
    ],
)
def test_a_planted_addition_is_found(
    text: str, present: set[str], fault: str, tmp_path: Path
) -> None:
    (tmp_path / "why.md").write_text("Key c is needed because of d.")
    assert fault in faults_of(text, present, 1, tmp_path)


def test_an_addition_with_its_record_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "why.md").write_text("Key `c` is needed because of d.")
    assert faults_of("a\n# why.md\nc\n", {"a", "c"}, 1, tmp_path) == []
