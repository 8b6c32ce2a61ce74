"""Rewards of given answers, from the judge that a scorer has, in a process of its own.

TrialRequest on stdin ──▶ `-m prefixrl.scorer.trial PARENT_PID` ──▶ TrialOutcome on stdout
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.wire.messages.groups import CodeMode, Fault, VerdictStatus

START_S = 400.0
"""Longest start of the process and of its judge's children, which are started three times if they fail."""
GRACE_S = 1.0
"""Time of a call beside its limit."""
MOST_STDERR_CHARS = 2_000
"""Most that is shown of what a function and its children write to stderr."""


class TrialOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `prefixrl try-reward`, handed to its process."""

    reward: str
    """A run file, or the reference of a function."""
    settings: tuple[str, ...]
    data: str | None
    run: str | None
    problems: int
    form: str | None
    least_right: float
    most_wrong: float


class TriedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to reward, and what a function may take of it."""

    text: str
    gold: str
    question: str
    code: CodeMode = "none"
    tokens: int = 0
    is_cut: bool = False
    """True: the length limit cut it."""
    prefix: str = ""
    source: str = ""


class TriedReward(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one call."""

    reward: float
    status: VerdictStatus
    extracted: str = ""
    """The answer that was found; with status `error` the reason."""
    fault: Fault = ""
    rule: str = ""
    parts: dict[str, float] = {}
    elapsed_s: float = 0.0
    """Seconds from the call to its verdict."""


class TrialRequest(msgspec.Struct, frozen=True):
    """The judge's config, and the answers."""

    config: str
    """Resolved, as JSON."""
    answers: list[TriedAnswer]
    calls: int
    """Number of times that every answer is judged."""


class TrialOutcome(msgspec.Struct, frozen=True):
    """A verdict per answer and call, or why there are none."""

    verdicts: list[list[TriedReward]] = []
    """By call, then in the order of the answers."""
    error: str = ""
    exit_code: int = 0
    """Exit code of a process that ends with that error."""


def try_answers(
    config: RunConfig, answers: Sequence[TriedAnswer], calls: int, shows_stderr: bool = True
) -> list[list[TriedReward]]:
    """Return the verdicts on answers by call, each in the order of the answers.

    Args:
        config: the run whose judge is asked.
        answers: the answers.
        calls: number of times that every answer is judged.
        shows_stderr: False: what the function writes, and its stack traces, are not shown.

    Raises:
        ConfigError: the function cannot be imported or called, or the judge lacks something on this host.
        PeerLost: the judge does not answer.
    """
    request = TrialRequest(config.model_dump_json(), list(answers), calls)
    command = [sys.executable, "-P", "-m", "prefixrl.scorer.trial", str(os.getpid())]
    limit_s = call_limit_s(config)
    patience_s = config.reward.patience_s if config.reward.url is not None else 0.0
    most_s = START_S + patience_s + calls * len(answers) * 2 * (limit_s + GRACE_S)
    # A file and no pipe: a program that the function started may hold it open.
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.run(
                command,
                input=msgspec.json.encode(request),
                stdout=subprocess.PIPE,
                stderr=stderr,
                check=False,
                timeout=most_s,
            )
        except subprocess.TimeoutExpired:
            raise PeerLost(
                f"the process that tries the reward gave no verdicts within {most_s:.0f} s"
            ) from None
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if process.returncode != 0:
        raise PeerLost(
            f"the process that tries the reward ended with {process.returncode}:\n"
            f"{said[-MOST_STDERR_CHARS:]}"
        )
    if shows_stderr:
        sys.stderr.write(said[:MOST_STDERR_CHARS])
    outcome = msgspec.json.decode(process.stdout, type=TrialOutcome)
    if outcome.error:
        kind = ConfigError if outcome.exit_code == ConfigError.exit_code else PeerLost
        raise kind(outcome.error)
    return outcome.verdicts


def call_limit_s(config: RunConfig) -> float:
    """Return the limit of one call."""
    if config.reward.url is not None:
        return config.reward.request_s
    return float(config.scorer.verify_timeout_s)
