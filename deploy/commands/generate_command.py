"""`prefixrl generate`: answers problems with an adapter and its target, line for line.

    stdin or sources ──▶ launch in a folder of its own: generation, rollouts, scorers ──▶ answers.jsonl ──▶ stdout, file

Only whole lines are written to the output, as they come. Everything else goes to stderr.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from prefixrl.common.config.data import DataConfig
from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.load import changed, from_flags
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.plans import ANSWERS_FILE, GREEDY, SAMPLED, AnswerLine
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.process import stop_event
from prefixrl.common.run.json_lines import AddedLines
from prefixrl.common.run.status import USAGE_FILE, total_usage
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.deploy.launch.launch import STOPPED, Launcher
from prefixrl.deploy.launch.offline_plan import (
    INCOMPLETE,
    OfflineRun,
    PlanOptions,
    data_flag_named,
    data_option,
    offline_run,
    with_problems,
)
from prefixrl.deploy.runs import checkpoints

STDIN = "-"
SHOWN_FAILURES = 10
FAILURES = {"bad_row": "bad row", "failed": "no answer", "error": "no verdict"}
"""Statuses of lines without an answer or a verdict, in words."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PlanOptions):
    """Options of `prefixrl generate`; `sets` may hold `-`, 0 samples: one greedy answer."""

    run: Path | None
    checkpoint: str | None
    adapter: str | None
    target: str | None
    suffix: str | None
    temperature: float | None
    overwrites: bool
    """The output may hold something already."""


TEMPERATURE = "Temperature of adapter and target when sampling; default: those of the run."
SAMPLES = "Sampled answers per problem; default: one greedy answer."
OUT = "Where the lines go; a new or empty file.  [default: stdout]"


@click.command("generate")
@click.argument("run", required=False, type=PATH)
@click.option("--checkpoint", metavar="N", help=f"Of RUN: {checkpoints.SERVED}")
@checkpoints.ema_option
@click.option("--adapter", metavar="MODEL", help="Without RUN: a folder or hub name.")
@click.option(
    "--target", metavar="MODEL", help="Without RUN: likewise; without it the adapter writes all."
)
@data_option(", or - for JSONL on stdin (default).")
@click.option("--suffix", help="Append this to every question, in place of a problem set's own.")
@click.option("--samples", type=click.IntRange(0), default=0, help=SAMPLES)
@click.option("--temperature", type=click.FloatRange(0), help=TEMPERATURE)
@settings_option
@click.option("--out", type=PATH, help=OUT)
@click.option(
    "--overwrite", "overwrites", is_flag=True, help="Replace the content of the file of --out."
)
def generate_command(out: Path | None, **options: Any) -> None:
    """Answer problems with the adapter of RUN (a run directory) and its target, in JSONL.

    Starts workers on this machine. A line per answer, in the order of the problems. Exit code 6: some row has no
    answer, or no verdict although it has a gold answer.
    """
    raise SystemExit(generate(GenerateOptions(**options), out))


class Copy:
    """Copies whole lines of a growing file to the output and counts failures."""

    def __init__(self, source: Path, out: IO[bytes], replaces: bool = False) -> None:
        """`replaces`: the output is a file that loses its content once the first line is there."""
        self._added = AddedLines(source)
        self._out = out
        self._replaces = replaces
        self.lines = 0
        self.failed = 0
        self.is_closed = False
        """The reader of the output is gone."""

    def more(self, is_last: bool = False) -> None:
        """Copy new lines, report failures on stderr; raise ConfigError if they cannot be written.

        `is_last`: everything is answered, even if there was nothing to answer.
        """
        if self.is_closed or not self._added.path.exists():
            return
        text = b"".join(self._added.blocks())
        for line in text.splitlines():
            self._count(msgspec.json.decode(line, type=AnswerLine))
        try:
            if self._replaces and (text or is_last):
                self._replaces = False
                # Only files hold bytes; pipes and devices cannot be truncated.
                if os.fstat(self._out.fileno()).st_size:
                    self._out.truncate(0)
            if self._out.isatty():
                text = printable(text.decode()).encode()  # still the same JSON
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            self.is_closed = True
        except OSError as error:
            self.is_closed = True
            raise ConfigError(f"--out: cannot be written: {error.strerror}") from None

    def _count(self, line: AnswerLine) -> None:
        self.lines += 1
        if line.status not in FAILURES:
            return
        self.failed += 1
        if self.failed <= SHOWN_FAILURES:
            click.echo(
                printable(f"{line.file} row {line.row}: {FAILURES[line.status]}: {line.reason}"),
                err=True,
            )
        elif self.failed == SHOWN_FAILURES + 1:
            click.echo("more rows failed; each has a line with status and reason", err=True)


def generate(options: GenerateOptions, out: Path | None) -> int:
    """Answer everything, return the exit code; raise ConfigError for a wrong option or output."""
    directory = Path(tempfile.mkdtemp(prefix="prefixrl-generate-"))
    keeps_logs = False
    try:
        if out is not None and out.is_file() and out.stat().st_size and not options.overwrites:
            size = f"{out.stat().st_size:,} bytes"
            raise ConfigError(
                f"--out {out}: holds {size} already; name a new or empty file, or give --overwrite"
            )
        with data_flag_named():
            generation = _plan(options, directory)
        _check_is_no_source(out, options, generation.config.data)
        (directory / "logs").mkdir()
        generation.write_plan()
        # A process that asks for answers cannot resume in the middle of them: its first error is the cause.
        launcher = generation.launcher("generation", uses_stderr=True, restarts=0)
        with _opened(out) as file:
            copy = Copy(directory / ANSWERS_FILE, file, replaces=out is not None)
            keeps_logs = True
            code = _answer(launcher, copy, generation.config)
        keeps_logs = code not in (0, ConfigError.exit_code, STOPPED, INCOMPLETE)
        return code
    finally:
        if keeps_logs:
            click.echo(f"all logs are in {directory / 'logs'}", err=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _answer(launcher: Launcher, copy: Copy, config: RunConfig) -> int:
    """Run the processes that answer and report their end; return the exit code."""
    stop = stop_event()

    def is_stopped() -> bool:
        copy.more()
        return stop.is_set() or copy.is_closed

    try:
        code = launcher.run_and_stop(is_stopped)
        # Lines of the last moment; without any, only an end in order empties the output file.
        copy.more(is_last=code == 0)
    finally:
        usage = Path(config.directory) / USAGE_FILE
        if usage.exists():
            counts = read_json(usage, dict[str, Usage])
            click.echo(f"endpoint: {total_usage(counts.values(), config.scorer.openai)}", err=True)
    if stop.is_set() or copy.is_closed:
        click.echo(f"stopped after {copy.lines} lines", err=True)
        return STOPPED
    if code:
        launcher.report_failure(code)
        return code
    failures = f", {copy.failed} of them without an answer or a verdict" if copy.failed else ""
    click.echo(f"{copy.lines} lines{failures}", err=True)
    return INCOMPLETE if copy.failed else 0


def _check_is_no_source(out: Path | None, options: GenerateOptions, data: DataConfig) -> None:
    """Raise ConfigError where the output is read as well, as problems or stdin."""
    if out is None:
        return
    read = [each.path for source in data.eval for each in (source, *source.without)]
    for path in map(Path, filter(None, read)):
        is_same = out.exists() and path.exists() and out.samefile(path)
        if is_same or (path.is_dir() and out.resolve().is_relative_to(path.resolve())):
            raise ConfigError(f"--out {out}: problems are read from {path}; give a file elsewhere")
    reads_stdin = STDIN in (options.sets or (STDIN,))
    if reads_stdin and out.is_file() and os.path.samestat(out.stat(), os.fstat(0)):
        raise ConfigError(f"--out {out}: problems are read from it, as stdin; give another file")


@contextlib.contextmanager
def _opened(out: Path | None) -> Iterator[IO[bytes]]:
    """Open the output; a file keeps its content until the first line is there."""
    if out is None:
        yield sys.stdout.buffer
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.flush()
            return
        # Python flushes once more at its end: let it flush into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        file = out.open("ab")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    with file:
        yield file


def _plan(options: GenerateOptions, directory: Path) -> OfflineRun:
    samples = options.samples
    temperature = options.temperature
    if samples > 1 and temperature == 0.0:
        raise ConfigError(
            f"--samples {samples}: greedy answers are all alike; give a --temperature above 0"
        )
    weights, config, sets = (_of_models if options.run is None else _of_run)(options, directory)
    if temperature:
        # The temperature of everything that writes.
        roles = ("rollout", "scorer") if config.mode == "prefix" else ("rollout",)
        config = changed(
            config, tuple(f"{role}.temperature={temperature}" for role in roles), "--temperature"
        )
    is_sampled = temperature != 0.0 and (samples > 0 or temperature is not None)
    return offline_run(
        config,
        weights,
        directory,
        with_problems(config.data, sets, options.suffix),
        decoding=SAMPLED if is_sampled else GREEDY,
        samples=max(1, samples),
    )


def _of_run(
    options: GenerateOptions, directory: Path
) -> tuple[checkpoints.Weights, RunConfig, tuple[str, ...]]:
    """Return the weights of a checkpoint of a run, its config, and the names of the problems."""
    assert options.run is not None
    if options.adapter or options.target:
        raise ConfigError(
            "--adapter and --target are for models without a run: leave RUN or them out"
        )
    config = checkpoints.config_of(options.run, options.all_settings)
    weights = checkpoints.weights_of(
        options.run,
        config,
        options.checkpoint or checkpoints.served_checkpoint(options.run),
        options.is_averaged,
    )
    return weights, config, _paths(options, directory)


def _of_models(
    options: GenerateOptions, directory: Path
) -> tuple[checkpoints.Weights, RunConfig, tuple[str, ...]]:
    """Return the weights of `--adapter`, a config of the two models, and the names of the problems."""
    if options.adapter is None:
        raise ConfigError(
            "nothing to answer with: give a RUN, or --adapter MODEL and --target MODEL"
        )
    if options.checkpoint or options.is_averaged:
        raise ConfigError(
            "--checkpoint and --ema are of a run: give RUN, or the folder as --adapter"
        )
    sets = _paths(options, directory)
    document: dict[str, Any] = {
        "directory": str(directory),
        "mode": "direct",
        "adapter": {"model": options.adapter},
        "data": {"train": list(sets)},
        "algorithm": {"iterations": 1},
    }
    if options.target is not None:
        document |= {"mode": "prefix", "target": {"model": options.target}}
    config = from_flags(document, options.all_settings)
    return checkpoints.Weights(0, config.adapter.model), config, sets


def _paths(options: GenerateOptions, directory: Path) -> tuple[str, ...]:
    """Return the sources as `data.eval` names them; stdin is copied to a file first."""
    sets = options.sets or (STDIN,)
    if sets.count(STDIN) > 1:
        raise ConfigError("--data -: stdin can be read once only")
    stdin_copy = directory / "stdin.jsonl"
    if STDIN in sets:
        if sys.stdin.isatty():
            click.echo("reading problems from the terminal, a JSON object per line", err=True)
        with stdin_copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    return tuple(str(stdin_copy) if each == STDIN else each for each in sets)
