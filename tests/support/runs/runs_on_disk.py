"""Directories of runs in every state, as real learners leave them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from prefixrl.common.run.directory_format import write_format
from prefixrl.common.run.documents import END_FILE, METRICS_FILE, SUMMARY_FILE, RunEnd
from prefixrl.learner.run import summary
from prefixrl.learner.run.summary import EvaluationOutcome
from support.fakes import document
from support.models.tiny_model import run_config
from support.runs.metrics_lines import metrics_line, write_metrics

HOLD = """
import sys
from pathlib import Path
from prefixrl.common.host.process import own
lock = own(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def made(directory: Path, adapter: Path, iterations: int, clip: float = 0.2) -> Path:
    """The directory of a run of which nobody noted the end."""
    directory.mkdir(parents=True)
    write_format(directory)
    config = run_config(adapter, algorithm={"clip": clip})
    (directory / "config.json").write_text(config.model_dump_json())
    if iterations:
        write_metrics(directory, [metrics_line(iteration) for iteration in range(iterations)])
    return directory


def finish(run: Path, accuracy: float) -> None:
    """Write a summary and the end of a finished run."""
    result = summary.summarise(document(), EvaluationOutcome(), [], 1, 1.0)
    content = json.loads(msgspec.json.encode(result))
    content |= {
        "accuracy": {"trained_adapter": accuracy},
        "accuracy_ci95": {"trained_adapter": [0.0, 1.0]},
    }
    content["versions"] = len((run / METRICS_FILE).read_bytes().splitlines())
    (run / SUMMARY_FILE).write_text(json.dumps(content))
    write_end(run, 0, "finished")


def write_end(run: Path, code: int, reason: str) -> None:
    """Write how a learner ended."""
    (run / END_FILE).write_bytes(msgspec.json.encode(RunEnd(exit_code=code, reason=reason)))


@contextmanager
def held(run: Path) -> Iterator[None]:
    """A process that works in the directory meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == b"locked\n"
        yield
