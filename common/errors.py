"""The errors a person may meet, what each means for the process, and its exit code.

    PrefixRLError
    ├── UserError          exit 2: something the user gave is wrong; one message, no stack trace
    │   ├── ConfigError    the run's TOML, a --set or a flag
    │   └── DataError      a data file or a model folder
    ├── Refusal            exit 3: a peer said no (another target model, another protocol, the probe failed)
    ├── RunIsOver          exit 0: no fault, this process came when there was nothing left to do
    ├── PeerLost           exit 4: a wait ran past its deadline; names what was awaited and from whom
    ├── TrainingFault      exit 5: the learner cannot go on (non-finite weights)
    │   └── NothingToTrain  the prompt filter lets too little through, or too much fails
    └── Halted             exit 143 (128 + SIGTERM): no fault, the learner was asked to stop and saved; the run is not finished

None of them is retried by the process that raises it: retrying is the supervisor's decision (launch, systemd, SLURM).
"""


class PrefixRLError(Exception):
    """Base of every error this software raises on purpose."""

    exit_code = 1
    is_fault = True


class UserError(PrefixRLError):
    """Something the user gave is wrong; the message says what, the value got, the values allowed, what to do."""

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


class TrainingFault(PrefixRLError):
    """Training cannot go on; the message names the iteration and the cause."""

    exit_code = 5


class NothingToTrain(TrainingFault):
    """Too little passes the prompt filter, or too much fails; the message names share, limit, causes and keys to change."""


class Halted(PrefixRLError):
    """The learner was asked to stop before the run was finished; what is trained is saved, and the next start goes on there."""

    exit_code = 143
    is_fault = False
