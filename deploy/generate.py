"""`prefixrl generate`: answers problems with a trained adapter and its target; JSONL in, JSONL out, line for line.

    stdin or sources ──▶ launch in a folder of its own: generation, rollouts, scorers ──▶ answers.jsonl ──▶ stdout or a file

What is written to the output are whole lines, as they come. All else goes to stderr.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import click
import msgspec

from prefixrl.common.config import ModelConfig, RunConfig, changed, from_flags
from prefixrl.common.data_section import DataConfig, Source, resolve
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import Usage, VerdictStatus
from prefixrl.common.offline import ANSWERS_FILE, GREEDY, PLAN_FILE, SAMPLED, GenerationPlan
from prefixrl.common.process import stop_event, write_atomically
from prefixrl.common.status import USAGE_FILE, spent
from prefixrl.deploy.checkpoints import LATEST, config_of, published, weights_of
from prefixrl.deploy.launch import STOPPED, Launcher

INCOMPLETE = 6
"""Exit code where some row has no answer, or its answer no verdict although it has a gold answer."""
STDIN = "-"
SHOWN_FAILURES = 10
FREE_PORT = "tcp://127.0.0.1:0"
"""A run that is still training keeps its own port."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    run: Path | None
    checkpoint: str | None
    is_averaged: bool
    adapter: str | None
    target: str | None
    sets: tuple[str, ...]
    """As `data.eval` names them, or `-`."""
    suffix: str | None
    samples: int
    """0: one greedy answer, unless there is a temperature."""
    temperature: float | None
    settings: tuple[str, ...]
    overwrites: bool
    """The output may hold something already."""


class _Line(msgspec.Struct, frozen=True):
    """What matters here of an `Answer`."""

    file: str
    row: int
    sample: int
    status: VerdictStatus | Literal["bad_row", "failed"]
    reason: str


class Copy:
    """Takes whole lines of a growing file to the output and counts what failed."""

    def __init__(self, source: Path, out: IO[bytes], replaces: bool = False) -> None:
        """`replaces`: the output is a file that loses what it held once the first line is there."""
        self._source = source
        self._out = out
        self._replaces = replaces
        self._offset = 0
        self.lines = 0
        self.failed = 0
        self.is_closed = False
        """Nobody reads the output any more."""

    def more(self, is_last: bool = False) -> None:
        """Copy what is new; what failed is told on stderr, the first few each by itself.

        Args:
            is_last: all is answered, even if that was nothing.

        Raises:
            ConfigError: the output cannot be written.
        """
        if self.is_closed or not self._source.exists():
            return
        with self._source.open("rb") as file:
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        for line in text.splitlines() if newline else ():
            self._tell(msgspec.json.decode(line, type=_Line))
        self._offset += len(text) + len(newline)
        try:
            if self._replaces and (newline or is_last):
                self._replaces = False
                self._empty()
            self._out.write(text + newline)
            self._out.flush()
        except BrokenPipeError:
            self.is_closed = True
        except OSError as error:
            self.is_closed = True
            raise ConfigError(f"--out: cannot be written: {error.strerror}") from None

    def _empty(self) -> None:
        # A pipe or device holds nothing, and cannot be cut.
        if os.fstat(self._out.fileno()).st_size:
            self._out.truncate(0)

    def _tell(self, line: _Line) -> None:
        self.lines += 1
        if line.status not in ("bad_row", "failed", "error"):
            return
        self.failed += 1
        if self.failed <= SHOWN_FAILURES:
            what = {"bad_row": "bad row", "failed": "no answer", "error": "no verdict"}[line.status]
            click.echo(f"{line.file} row {line.row}: {what}: {line.reason}", err=True)
        elif self.failed == SHOWN_FAILURES + 1:
            click.echo("more rows failed; each has a line with status and reason", err=True)


def generate(options: Options, out: Path | None) -> int:
    """Answer everything; returns the exit code.

    Raises:
        ConfigError: a run, checkpoint, model, data set, setting or output that cannot be.
    """
    directory = Path(tempfile.mkdtemp(prefix="prefixrl-generate-"))
    keeps_logs = False
    try:
        _check_is_free(out, options.overwrites)
        try:
            plan, config = _plan(options, directory)
        except ConfigError as error:
            # The config calls it so; all that it holds there was named by --data.
            raise ConfigError(str(error).replace("data.train", "--data")) from None
        _check_is_no_source(out, options, config.data)
        launcher = _launcher(plan, config)
        with _opened(out) as file:
            copy = Copy(directory / ANSWERS_FILE, file, replaces=out is not None)
            keeps_logs = True
            code = _answered(launcher, copy, config)
        keeps_logs = code not in (0, ConfigError.exit_code, STOPPED)
        return _told(launcher, copy, code)
    finally:
        if keeps_logs:
            click.echo(f"all logs are in {directory / 'logs'}", err=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _launcher(plan: GenerationPlan, config: RunConfig) -> Launcher:
    directory = Path(config.directory)
    (directory / "logs").mkdir()
    write_atomically(directory / PLAN_FILE, msgspec.json.encode(plan).decode())
    command = ["prefixrl.learner.generation", str(directory)]
    # What asks for answers cannot go on in the middle of them: it ends once, and what it says then is the cause.
    return Launcher(config, command, "generation", says_on_stderr=True, restarts=0)


def _answered(launcher: Launcher, copy: Copy, config: RunConfig) -> int:
    """Have everything answered and copied, and tell what it cost; returns the exit code of what asked."""
    stop = stop_event()

    def is_stopped() -> bool:
        copy.more()
        return stop.is_set() or copy.is_closed

    try:
        code = launcher.run_and_stop(is_stopped)
        copy.more(is_last=code == 0)
    finally:
        usage = Path(config.directory) / USAGE_FILE
        if usage.exists():
            counts = msgspec.json.decode(usage.read_bytes(), type=dict[str, Usage])
            click.echo(f"endpoint: {spent(counts.values(), config.scorer.openai)}", err=True)
    return STOPPED if stop.is_set() or copy.is_closed else code


def _told(launcher: Launcher, copy: Copy, code: int) -> int:
    """Tell the end; returns the exit code of the command."""
    if code == STOPPED:
        click.echo(f"stopped after {copy.lines} lines", err=True)
        return code
    if code != 0:
        launcher.tell_failure(code)
        return code
    said = f", {copy.failed} of them without an answer or a verdict" if copy.failed else ""
    click.echo(f"{copy.lines} lines{said}", err=True)
    return INCOMPLETE if copy.failed else 0


# --- the output ------------------------------------------------------------------------------------------------------


def _check_is_free(out: Path | None, overwrites: bool) -> None:
    """Raise ConfigError where the output holds something already that nobody gave up."""
    if out is not None and out.is_file() and out.stat().st_size and not overwrites:
        raise ConfigError(
            f"--out {out}: holds {out.stat().st_size:,} bytes already; name a file that is new or empty, or give "
            "--overwrite to lose them"
        )


def _check_is_no_source(out: Path | None, options: Options, data: DataConfig) -> None:
    """Raise ConfigError where the output is read as well: problems, a folder of them, what is left out, stdin."""
    if out is None:
        return
    read = [each.path for source in data.eval for each in (source, *source.without)]
    for path in map(Path, filter(None, read)):
        if _is_part(out, path):
            raise ConfigError(f"--out {out}: problems are read from {path}; give a file elsewhere")
    is_from_stdin = STDIN in (options.sets or (STDIN,))
    if is_from_stdin and out.is_file() and os.path.samestat(out.stat(), os.fstat(0)):
        raise ConfigError(f"--out {out}: problems are read from it, as stdin; give another file")


def _is_part(out: Path, read: Path) -> bool:
    """Whether a file is this one, under whatever name, or in this folder."""
    return (out.exists() and read.exists() and out.samefile(read)) or (
        read.is_dir() and out.resolve().is_relative_to(read.resolve())
    )


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[IO[bytes]]:
    """The output; a file keeps what it holds until the first line is there."""
    if out is None:
        yield sys.stdout.buffer
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.flush()
            return
        # Python flushes once more at its end: into nothing then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        file = out.open("ab")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    with file:
        yield file


# --- the plan --------------------------------------------------------------------------------------------------------


_Source = tuple[int, tuple[str, ...], RunConfig]
"""Iterations trained, digests under which that was published, and the config that answers."""


def _plan(options: Options, directory: Path) -> tuple[GenerationPlan, RunConfig]:
    samples, temperature = options.samples, options.temperature
    if samples > 1 and temperature == 0.0:
        raise ConfigError(
            f"--samples {samples} with --temperature 0: greedy answers are all alike; give a temperature above 0"
        )
    made = _of_models if options.run is None else _of_run
    version, hashes, config = made(options, directory)
    broker = config.broker.model_copy(update={"listen": FREE_PORT})
    config = config.model_copy(update={"directory": str(directory), "broker": broker})
    is_sampled = temperature != 0.0 and (samples > 0 or temperature is not None)
    decoding = SAMPLED if is_sampled else GREEDY
    plan = GenerationPlan(config.model_dump_json(), version, hashes, decoding, max(1, samples))
    return plan, config


def _of_run(options: Options, directory: Path) -> _Source:
    """Of a checkpoint of a run."""
    run = options.run
    assert run is not None
    if options.adapter or options.target:
        raise ConfigError(
            "--adapter and --target are for models without a run; a run's models are its own: leave RUN or them out"
        )
    config = config_of(run, options.settings)
    config = _heated(config, options.temperature)
    wanted = options.checkpoint or LATEST
    version, model = weights_of(run, config, wanted, options.is_averaged)
    sources = _with_suffix(
        DataConfig.model_validate({"train": _paths(options, directory)}).train, options.suffix
    )
    data = config.data.model_copy(update={"train": sources, "eval": sources})
    adapter = ModelConfig(model=model)
    config = config.model_copy(update={"adapter": adapter, "data": resolve(data, Path.cwd())})
    return version, () if options.is_averaged else published(run).get(version, ()), config


def _of_models(options: Options, directory: Path) -> _Source:
    """Of an adapter, and perhaps a target, that are given by themselves."""
    if options.adapter is None:
        raise ConfigError(
            "nothing to answer with: give a RUN, or --adapter MODEL and --target MODEL"
        )
    if options.checkpoint or options.is_averaged:
        raise ConfigError(
            "--checkpoint and --ema are of a run: give RUN, or the folder as --adapter"
        )
    document: dict[str, Any] = {
        "directory": str(directory),
        "mode": "direct" if options.target is None else "prefix",
        "adapter": {"model": options.adapter},
        "data": {"train": _paths(options, directory)},
        "algorithm": {"iterations": 1},
    }
    if options.target is not None:
        document["target"] = {"model": options.target}
    config = _heated(from_flags(document, options.settings), options.temperature)
    sources = _with_suffix(config.data.train, options.suffix)
    data = config.data.model_copy(update={"train": sources, "eval": sources})
    return 0, (), config.model_copy(update={"data": data})


def _heated(config: RunConfig, temperature: float | None) -> RunConfig:
    """With the temperature of everything that writes."""
    if not temperature:
        return config
    roles = ("rollout", "scorer") if config.mode == "prefix" else ("rollout",)
    settings = tuple(f"{role}.temperature={temperature}" for role in roles)
    return changed(config, settings, "--temperature")


def _paths(options: Options, directory: Path) -> list[str]:
    """What the problems are in, as `data.eval` names it; what stdin holds is kept in a file first."""
    sets = options.sets or (STDIN,)
    if sets.count(STDIN) > 1:
        raise ConfigError("--data -: stdin can be read once only")
    kept = directory / "stdin"
    if STDIN in sets:
        if sys.stdin.isatty():
            click.echo("reading problems from the terminal, a JSON object per line", err=True)
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    return [str(kept) if each == STDIN else each for each in sets]


def _with_suffix(sources: tuple[Source, ...], suffix: str | None) -> tuple[Source, ...]:
    if suffix is None:
        return sources
    return tuple(source.model_copy(update={"suffix": suffix}) for source in sources)
