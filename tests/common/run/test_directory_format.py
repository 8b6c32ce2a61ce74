"""A run directory of another release is refused by name by everything that reads one, and left as it was."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.serving import command
from prefixrl.common.run.directory_format import FORMAT, check_format, write_format
from prefixrl.deploy.commands.eval_command import EvaluateOptions, evaluate
from prefixrl.deploy.commands.generate_command import GenerateOptions, generate
from prefixrl.deploy.launch.launch import _throw_away, launch
from prefixrl.deploy.runs import checkpoints, inspect, report
from prefixrl.deploy.view import run_state as status
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.run.directory import RunDirectory
from prefixrl.learner.start import start
from support.fakes import run_on_disk
from support.paths import EXAMPLE

OTHERS = {
    "an earlier release": (
        None,
        rf"of format 1, of release 0\.1; .*reads format {FORMAT} only; finish .* release 0\.1,",
    ),
    "a later release": (
        b'{"format":5,"release":"0.9"}',
        rf"of format 5, of release 0\.9; .*reads format {FORMAT} only;",
    ),
    "nobody knows which release": (b'{"form', r"format\.json is damaged: .*restore it"),
}
LEFT = ("journal", "metrics.jsonl", "summary.json", "advantages.jsonl", "endpoint", "lock")
"""Other files of such a run; nothing in them can be read."""


@pytest.fixture(params=OTHERS)
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunConfig, str]:
    """A run of another release, and what its refusal says."""
    config = run_on_disk(tmp_path, rollout={"engine": "simulated"})
    mark, said = OTHERS[request.param]
    known = Path(config.directory) / "format.json"
    known.unlink()
    if mark is not None:
        known.write_bytes(mark)
    for name in LEFT:
        (known.parent / name).write_bytes(b"what no release reads")
    return config, said


def everything_in(directory: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in (directory, *directory.rglob("*"))
    }


def evaluated(directory: Path) -> object:
    options = EvaluateOptions(
        checkpoints=(),
        arms=(),
        sets=(),
        samples=0,
        targets=(),
        opening_tokens=16,
        is_averaged=False,
        settings=(),
        fresh=False,
    )
    return evaluate([directory], options, None)


def generated(directory: Path) -> object:
    options = GenerateOptions(
        run=directory,
        checkpoint=None,
        is_averaged=False,
        adapter=None,
        target=None,
        sets=(),
        suffix=None,
        samples=0,
        temperature=None,
        settings=(),
        overwrites=False,
    )
    return generate(options, None)


READERS: dict[str, Callable[[Path], object]] = {
    "prefixrl launch": lambda directory: launch(
        EXAMPLE / "run.toml", (f"directory={directory}",), False
    ),
    "prefixrl status": status.fetch,
    "prefixrl inspect": lambda directory: list(inspect.inspect(directory, as_json=True)),
    "prefixrl report, its page": report.write_report,
    "prefixrl report, its table": report.print_table,
    "prefixrl eval": evaluated,
    "prefixrl generate": generated,
    "a command that asks for the config": lambda directory: checkpoints.config_of(directory, ()),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_command_refuses_a_run_of_another_release_and_changes_nothing(
    reader: str, refused: tuple[RunConfig, str]
) -> None:
    config, said = refused
    directory = Path(config.directory)
    before = everything_in(directory)
    with pytest.raises(ConfigError, match=said) as caught:
        READERS[reader](directory)
    assert str(directory) in str(caught.value) and "--fresh" in str(caught.value)
    assert everything_in(directory) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_refuses_a_run_of_another_release_and_changes_nothing(
    rank: int, refused: tuple[RunConfig, str]
) -> None:
    config, said = refused
    before = everything_in(Path(config.directory))
    with pytest.raises(ConfigError, match=said):
        start(config, rank, 2, lambda: False)
    with pytest.raises(ConfigError, match=said):
        RunDirectory(config)
    assert everything_in(Path(config.directory)) == before


@pytest.mark.slow
def test_a_broker_refuses_a_run_of_another_release_and_changes_nothing(
    refused: tuple[RunConfig, str],
) -> None:
    config, said = refused
    before = everything_in(Path(config.directory))
    started = command(
        "prefixrl.learner.broker", Path(config.directory), Start(0, "tcp://127.0.0.1:9")
    )
    ended = subprocess.run(started, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(ended.stderr)
    assert everything_in(Path(config.directory)) == before


def test_fresh_removes_a_run_of_another_release(refused: tuple[RunConfig, str]) -> None:
    _throw_away(Path(refused[0].directory))
    assert not Path(refused[0].directory).exists()


def test_fresh_removes_a_run_whose_config_this_release_cannot_read(tmp_path: Path) -> None:
    directory = Path(run_on_disk(tmp_path).directory)
    known = directory / "config.json"
    known.write_text(json.dumps(json.loads(known.read_text()) | {"a key of that release": 1}))
    (directory / "format.json").unlink()
    _throw_away(directory)
    assert not directory.exists()


def test_a_learner_writes_the_format_into_the_directory_that_it_adopts(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    known = Path(config.directory)
    (known / "config.json").unlink()
    (known / "format.json").unlink()
    RunDirectory(config)._lock.close()
    assert json.loads((known / "format.json").read_text())["format"] == FORMAT
    check_format(known)
    RunDirectory(config)._lock.close()


def test_a_directory_without_a_run_is_of_no_format(tmp_path: Path) -> None:
    check_format(tmp_path)
    check_format(tmp_path / "not there yet")
    write_format(tmp_path)
    check_format(tmp_path)
