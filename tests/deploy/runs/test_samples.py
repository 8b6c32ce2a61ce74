"""`prefixrl samples`: rows of a journal as texts, by the adapter's tokenizer."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import BatchFormed, GroupScored, JournalRecord, RunHeader
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import write_format
from prefixrl.common.run.documents import ADVANTAGES_FILE, AdvantageLine
from prefixrl.common.run.tracker import SampleText
from prefixrl.common.wire.messages.groups import Prompt, ScoredGroup
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.runs.samples import decoder, lines_of
from support import messages
from support.models.tiny_model import with_tokenizer

ITERATIONS = 16
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\u202e\u200f\niteration 15, group 99, p99: reward 1 (ok)"


def group(seq: int, iteration: int, tokens: tuple[int, ...]) -> ScoredGroup:
    """Two rows: the first with these tokens and reward 1, the second with a text of its own and reward 0."""
    rows = [messages.row(each, version=iteration) for each in (tokens, (5, 10 + seq))]
    verdicts = (
        messages.verdict(
            reward,
            extracted=f"{reward:g}",
            completion=f"so it is {reward:g}{HOSTILE}",
            rule="number" if reward else "",
        )
        for reward in (1.0, 0.0)
    )
    prefixes = messages.group(seq, *rows, prompt=Prompt(f"p{seq}", f"what is {seq}?", str(seq)))
    return messages.scored_group(prefixes, *verdicts, version=iteration)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    with_tokenizer(tmp_path / "adapter")
    directory = tmp_path / "run"
    directory.mkdir()
    write_format(directory)
    config = {"adapter": {"model": str(tmp_path / "adapter")}, "rollout": {"engine": "auto"}}
    (directory / "config.json").write_text(json.dumps(config))
    journal = Journal(directory / "journal")
    records: list[JournalRecord] = [RunHeader("r", 7, b"key")]
    lines = []
    for iteration in range(ITERATIONS):
        # From the middle on every prompt gets the same first row.
        tokens = (7, 8) if iteration >= ITERATIONS // 2 else (7, 20 + iteration)
        records += [
            GroupScored(group(iteration, iteration, tokens)),
            BatchFormed(iteration, (iteration,)),
        ]
        lines.append(AdvantageLine(iteration, iteration, [0.5 + iteration, -0.5]))
    journal.append(records)
    journal.close()
    (directory / ADVANTAGES_FILE).write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    )
    assert len(list(json_lines.read(directory / ADVANTAGES_FILE, AdvantageLine))) == ITERATIONS
    return directory


def shown(run: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["samples", str(run), *flags], catch_exceptions=False)


def test_the_newest_iteration_is_shown_with_question_texts_verdict_and_advantage(run: Path) -> None:
    output = shown(run).output
    assert "iteration 15, group 15, p15: reward 1 (ok by number), advantage +15.500" in output
    assert "iteration 15, group 15, p15: reward 0 (ok), advantage -0.500" in output
    for line in (
        "question: what is 15?",
        "prefix: w7 w8",
        "completion: so it is 1",
        "gold: 15   found: 1",
    ):
        assert line in output
    assert output.count("prefix: w7 w8") == 1, "a text of a group stands once"


def test_the_commonest_text_stands_with_its_share_as_it_takes_over(run: Path) -> None:
    lines = [
        line.split()
        for line in shown(run).output.splitlines()
        if line.startswith("  ") and "%" in line
    ]
    shares = {line[1]: line[2:] for line in lines if line[0] == "iteration"}
    assert shares["0-1"][0] == "25.0%"
    assert shares["14-15"] == ["50.0%", "1.000", "'w7", "w8'"]


def test_best_and_worst_order_by_advantage_and_json_has_every_field(run: Path) -> None:
    best, worst = (
        json.loads(shown(run, flag, "--count", "1", "--iteration", "3", "--json").output)
        for flag in ("--best", "--worst")
    )
    assert (best["advantage"], worst["advantage"]) == (3.5, -0.5)
    assert best == {
        "iteration": 3,
        "group": 3,
        "prompt_id": "p3",
        "question": "what is 3?",
        "gold": "3",
        "draft": "",
        "prefix": "w7 w23",
        "completion": best["completion"],
        "extracted": "1",
        "status": "ok",
        "reward": 1.0,
        "advantage": 3.5,
        "parts": "",
        "rule": "number",
    }


def test_an_id_without_a_token_is_seen(run: Path) -> None:
    decode = decoder(run)
    assert (
        decode([7, 64, 9999, 8]) == "w7<id 64><id 9999>w8"
        and decode([7, 8]) == "w7 w8"
        and decode([]) == ""
    )


def test_what_a_model_wrote_cannot_move_a_terminal(run: Path) -> None:
    for flags in ((), ("--json",)):
        output = shown(run, *flags).output
        assert "\\u001b]0;owned" in output and not set(output) & set("\x1b\x07\r\u202e\u200f")
        assert not [
            line for line in output.splitlines() if line.startswith("iteration 15, group 99")
        ], "no forged sample"


def test_an_iteration_that_is_not_there_and_a_run_without_any_are_refused(run: Path) -> None:
    late = shown(run, "--iteration", "99")
    assert late.exit_code == 2 and "--iteration 99: trained are 0 to 15" in late.output
    shutil.rmtree(run / "journal")
    journal = Journal(run / "journal")
    journal.append([RunHeader("r", 7, b"key")])
    journal.close()
    empty = shown(run)
    assert empty.exit_code == 2 and "nothing is trained yet" in empty.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder, why in (
        (tmp_path, f"no file {tmp_path}/config.json"),
        (tmp_path / "gone", "there is no such folder"),
    ):
        refused = shown(folder)
        assert refused.exit_code == 2 and f"{folder} holds no run ({why})" in refused.output


def test_only_where_an_answer_was_looked_for_is_it_told_what_was_found() -> None:
    sample = SampleText(
        iteration=1,
        group=2,
        prompt_id="p",
        question="q",
        gold="g",
        prefix="a",
        completion="b",
        extracted="",
        status="no_answer",
        reward=0.0,
        advantage=None,
    )
    assert list(lines_of(sample))[-2].endswith("gold: g   found: nothing")
    judged_otherwise = msgspec.structs.replace(sample, status="ok")
    assert list(lines_of(judged_otherwise))[-2].endswith("gold: g")
