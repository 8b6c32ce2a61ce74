"""`prefixrl generate` copies whole lines as they come, and reports failures, its end and its cost."""

import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.config.data import DataConfig, Source, resolve
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import ANSWERS_FILE
from prefixrl.common.run.status import USAGE_FILE
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.deploy.commands.generate_command import (
    SHOWN_FAILURES,
    Copy,
    GenerateOptions,
    _check_is_no_source,
    generate,
)
from prefixrl.deploy.launch import offline_plan
from prefixrl.deploy.launch.launch import Launcher
from support.paths import ROOT


def line(row: int, status: str = "ok") -> bytes:
    problem = {"source": "s", "id": "", "question": "q", "gold": None, "family": ""}
    said = problem | {
        "file": "f",
        "row": row,
        "sample": 0,
        "status": status,
        "reason": f"because {row}",
    }
    return json.dumps(said).encode() + b"\n"


def test_only_whole_lines_are_copied_and_each_once(tmp_path: Path) -> None:
    out = io.BytesIO()
    copy = Copy(tmp_path / "answers.jsonl", out)
    copy.more()
    assert out.getvalue() == b"", "there is nothing yet"
    with (tmp_path / "answers.jsonl").open("wb", buffering=0) as file:
        file.write(line(1) + line(2)[:9])
        copy.more()
        assert out.getvalue() == line(1)
        file.write(line(2)[9:])
        copy.more()
        copy.more()
    assert out.getvalue() == line(1) + line(2)
    assert (copy.lines, copy.failed) == (2, 0)


def test_failures_are_counted_and_the_first_ones_told_with_row_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["bad_row", "failed", "error", "no_gold", "no_answer", *["bad_row"] * SHOWN_FAILURES]
    lines = [line(row, kind) for row, kind in enumerate(kinds, start=1)]
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines))
    copy = Copy(tmp_path / "answers.jsonl", io.BytesIO())
    copy.more()
    assert (copy.lines, copy.failed) == (len(kinds), 3 + SHOWN_FAILURES)
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == [
        "f row 1: bad row: because 1",
        "f row 2: no answer: because 2",
        "f row 3: no verdict: because 3",
    ]
    assert len(told) == SHOWN_FAILURES + 1 and "more rows failed" in told[-1]


def test_a_reader_that_has_gone_ends_the_copying(tmp_path: Path) -> None:
    class Gone(io.BytesIO):
        def write(self, given: object) -> int:
            raise BrokenPipeError

    (tmp_path / "answers.jsonl").write_bytes(line(1))
    copy = Copy(tmp_path / "answers.jsonl", Gone())
    copy.more()
    assert copy.is_closed
    copy.more()


OLD = b"answers that took hours\n" * 9
LOST = "print('error: no answer within 1 s', file=sys.stderr); sys.exit(4)"
ANSWERS = f"open(folder + '/{ANSWERS_FILE}', 'wb').write({line(1)!r})"
NOTHING = f"open(folder + '/{ANSWERS_FILE}', 'wb')"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with problems; temporary ones are made below it, and signals are as before afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "given").mkdir()
    (tmp_path / "given/problems.jsonl").write_text('{"question": "sum 1 2"}\n')
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def options(place: Path, **given: Any) -> GenerateOptions:
    usual: dict[str, Any] = {
        "run": None,
        "checkpoint": None,
        "is_averaged": False,
        "target": None,
        "suffix": None,
        "adapter": str(ROOT / "deploy/examples/arithmetic_direct/policy"),
        "samples": 0,
        "temperature": None,
        "sets": (str(place / "given/problems.jsonl"),),
        "settings": ("rollout.answer_tokens=24",),
        "overwrites": False,
    }
    return GenerateOptions(**usual | given)


def asked_by(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this script asked for answers, in the folder that it knows as `folder`."""

    class Scripted(Launcher):
        def __init__(self, config: RunConfig, given: list[str], *named: str, **others: Any) -> None:
            super().__init__(config, given, *named, **others)
            start = f"import sys; folder = {given[1]!r}; print('started', flush=True); "
            self.learner.command = [sys.executable, "-c", start + script]

    monkeypatch.setattr(offline_plan, "Launcher", Scripted)


def test_what_asks_for_answers_ends_once_and_its_last_words_and_logs_are_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_by(LOST, monkeypatch)
    assert generate(options(place), place / "out.jsonl") == 4
    told = capsys.readouterr().err
    assert "no answer within 1 s" in told and "starting it again" not in told
    (logs,) = place.glob("prefixrl-generate-*/logs")
    assert f"all logs are in {logs}" in told
    assert (logs / "generation.log").read_text().count("started") == 1


def test_nothing_is_left_of_a_call_that_ended_well(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_by(ANSWERS, monkeypatch)
    assert generate(options(place), place / "out.jsonl") == 0
    assert capsys.readouterr().err == "1 lines\n"
    assert not list(place.glob("prefixrl-generate-*"))


@pytest.mark.parametrize(
    ("script", "kept"),
    [(LOST, OLD), (ANSWERS, line(1)), (NOTHING, b"")],
    ids=["lost", "one", "none"],
)
def test_earlier_answers_go_only_where_asked_and_when_there_are_new_ones(
    script: str, kept: bytes, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_by(script, monkeypatch)
    out = place / "out.jsonl"
    out.write_bytes(OLD)
    with pytest.raises(ConfigError, match=r"out\.jsonl: holds 216 bytes already; .* --overwrite"):
        generate(options(place), out)
    assert out.read_bytes() == OLD
    generate(options(place, overwrites=True), out)
    assert out.read_bytes() == kept


def test_an_output_that_is_no_file_is_written_as_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_by(ANSWERS, monkeypatch)
    assert generate(options(place), Path(os.devnull)) == 0


def test_what_the_endpoint_was_asked_for_is_told_at_the_end_however_it_came(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = msgspec.json.encode(
        {
            "one": Usage(requests=2, prompt_tokens=2_000_000, completion_tokens=8),
            "two": Usage(requests=1, prompt_tokens=1_000_000, completion_tokens=4),
        }
    )
    counted = f"open(folder + '/{USAGE_FILE}', 'wb').write({usage!r}); "
    models = {
        name: str(ROOT / f"deploy/examples/arithmetic/{name}") for name in ("adapter", "target")
    }
    endpoint = ("engine=openai", "openai.url=http://127.0.0.1:1/v1", "openai.prompt_price=2.0")
    given = models | {"settings": tuple(f"scorer.{setting}" for setting in endpoint)}
    for script, last in ((ANSWERS, "1 lines"), (LOST, "all logs are in")):
        asked_by(counted + script, monkeypatch)
        (place / "out.jsonl").unlink(missing_ok=True)
        generate(options(place, **given), place / "out.jsonl")
        told = capsys.readouterr().err
        assert (
            "endpoint: 3 requests, 3,000,000 prompt and 12 completion tokens, cost 6.00\n" in told
        )
        assert told.splitlines()[-1].startswith(last)


@pytest.mark.parametrize("name", ["given/problems.jsonl", "other name", "link", "given/new.jsonl"])
def test_an_output_that_is_read_as_well_is_refused_and_stays(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_by(ANSWERS, monkeypatch)
    problems = place / "given/problems.jsonl"
    text = problems.read_bytes()
    (place / "other name").hardlink_to(problems)
    (place / "link").symlink_to(problems)
    sets = (str(place / "given") if name == "given/new.jsonl" else str(problems),)
    with pytest.raises(ConfigError, match=r"^--out .*: problems are read from .*given"):
        generate(options(place, sets=sets, overwrites=True), place / name)
    assert problems.read_bytes() == text and not (place / "given/new.jsonl").exists()


def test_what_is_left_out_of_the_problems_and_stdin_are_read_too(place: Path) -> None:
    problems, excluded = place / "given/problems.jsonl", place / "excluded.jsonl"
    excluded.write_bytes(problems.read_bytes())
    source = Source(path=str(problems), without=(Source(path=str(excluded)),))
    data = resolve(DataConfig(train=(source,), eval=(source,)), place)
    with pytest.raises(ConfigError, match=r"problems are read from .*excluded\.jsonl"):
        _check_is_no_source(excluded, options(place), data)
    out = place / "out.jsonl"
    out.write_bytes(OLD)
    _check_is_no_source(out, options(place), data)
    kept = os.dup(0)
    try:
        with out.open("rb") as file:
            os.dup2(file.fileno(), 0)
        _check_is_no_source(out, options(place), data)
        with pytest.raises(ConfigError, match="problems are read from it, as stdin"):
            _check_is_no_source(out, options(place, sets=()), data)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
