"""The errors a user may see, their meaning for the process, and its exit code.

    PrefixRLError
    ├── UserError          exit 2: something the user gave is wrong; one message, no stack trace
    │   ├── ConfigError    the run's TOML, a --set or a flag
    │   └── DataError      a data file or a model folder
    ├── Refusal            exit 3: a peer refused (another target model, another protocol, the probe failed)
    ├── RunIsOver          exit 0: no fault, this process came when the run was over
    ├── PeerLost           exit 4: a wait ran past its deadline; names what was awaited and from whom
    ├── DiskFault          exit 1: a disk failed under what must be written
    ├── TrainingFault      exit 5: the learner cannot go on (non-finite weights)
    │   ├── NothingToTrain  the prompt filter lets too little through, or too much fails
    │   └── NotSaved        a checkpoint could not be written; older ones are there
    └── Halted             exit 143 (128 + SIGTERM): the learner was asked to stop and saved; the run is not finished

None of them is retried by the process that raises it: retrying is the supervisor's decision (launch, systemd, SLURM).
"""

import errno
import shlex

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk, or a quota, that is full."""
CROWDED = (errno.EMFILE, errno.ENFILE)
"""Numbers of the errors of a process, or a machine, with too many open files."""


def to_copy(command: str, *words: object) -> str:
    """Return a command with more words in back quotes, each word quoted for a shell where it must be."""
    return f"`{command} {shlex.join(map(str, words))}`"


class PrefixRLError(Exception):
    """Base of every error this software raises on purpose."""

    exit_code = 1
    is_fault = True


class UserError(PrefixRLError):
    """The user gave something wrong; names the fault, the value got, those allowed, the remedy."""

    exit_code = 2


class ConfigError(UserError):
    """The run file, a `--set` or a flag is wrong."""


class DataError(UserError):
    """A data file or a model folder is missing or malformed."""


class Refusal(PrefixRLError):
    """A peer refused this process for good; doing the same again would be refused again."""

    exit_code = 3


class RunIsOver(PrefixRLError):
    """The run ended before this process had joined it."""

    exit_code = 0
    is_fault = False


class PeerLost(PrefixRLError):
    """A wait ran past its deadline; the message names what was awaited and from whom."""

    exit_code = 4


class DiskFault(PrefixRLError):
    """A disk failed under what must be written; names both."""


class TrainingFault(PrefixRLError):
    """Training cannot go on; the message names the iteration and the cause."""

    exit_code = 5


class NothingToTrain(TrainingFault):
    """Too little passes the prompt filter, or too much fails; names share, limit, causes, keys."""


class NotSaved(TrainingFault):
    """A checkpoint could not be written; names its iteration, the cause, the newest one."""


class Halted(PrefixRLError):
    """The learner was asked to stop before the end; it saved, and the next start goes on there."""

    exit_code = 143
    is_fault = False


def is_full(error: BaseException) -> bool:
    """Return True for a write that found no room; safetensors hides the number in its text."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)


def is_crowded(error: BaseException) -> bool:
    """Return True for a file that could not be opened because too many are open."""
    return isinstance(error, OSError) and error.errno in CROWDED
