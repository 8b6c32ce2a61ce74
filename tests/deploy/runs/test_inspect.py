"""The lines of `prefixrl inspect`."""

from pathlib import Path

from click.testing import CliRunner

from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    RunHeader,
)
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.deploy.__main__ import main
from support.fakes import run_on_disk
from support.messages import group, row, scored_group, verdict

OWNED = "\x1b]0;owned\x07"


def test_what_peers_wrote_cannot_move_a_terminal(tmp_path: Path) -> None:
    prefixes = group(0, row([1]), prompt=Prompt(f"p{OWNED}", "?", "1"))
    scored = scored_group(prefixes, verdict(extracted=OWNED, rule=f"number{OWNED}"))
    write_format(tmp_path)
    journal = Journal(tmp_path / "journal")
    ended = GroupEnded(seq=1, state="failed", cause=OWNED)
    journal.append([RunHeader("r", 7, b"key"), GroupScored(scored), ended, BatchFormed(0, (0,))])
    journal.close()
    for flags in ([], ["--json"]):
        shown = (
            CliRunner()
            .invoke(main, ["inspect", str(tmp_path), *flags], catch_exceptions=False)
            .output
        )
        assert "\\u001b]0;owned" in shown and not set(shown) & set(OWNED[0] + OWNED[-1])
        assert ('"rule":"number' in shown) is bool(flags)


def test_only_a_finished_run_must_have_trained_or_ended_all_its_groups(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(run_on_disk(tmp_path).model_dump_json())
    write_format(tmp_path)
    journal = Journal(tmp_path / "journal")
    journal.append([RunHeader("r", 7, b"key"), GroupIssued(0, 0, 0)])
    journal.close()
    end = tmp_path / "end.json"
    for ended, code, output in (
        ("", 0, "no fault"),
        ('{"exit_code":4,"reason":"stopped"}', 0, "no fault"),
        ('{"exit_code":0,"reason":"finished"}', 2, "1 groups neither trained nor ended: 0"),
    ):
        if ended:
            end.write_text(ended)
        found = CliRunner().invoke(main, ["inspect", str(tmp_path), "--check"])
        assert (found.exit_code, output in found.output) == (code, True), found.output
