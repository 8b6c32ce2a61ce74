"""`[launch]` and `[slurm]`: processes of one machine, and jobs of a cluster."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from prefixrl.common.config.section import NonNegative, Positive, PositiveFloat, Section, Several


def _one_each(value: Any) -> Any:
    """Read `[0, 1]` as `[[0], [1]]`: a process with one GPU."""
    if not isinstance(value, list):
        return value
    return [[gpus] if isinstance(gpus, int) else gpus for gpus in value]


Gpus = Several[NonNegative]
PerProcess = Annotated[Several[Gpus], BeforeValidator(_one_each)]


class DevicesConfig(Section):
    """GPUs of the processes on this machine, as numbers from 0; what is absent is dealt out."""

    learner: Gpus = ()
    """One per rank."""
    rollout: PerProcess = ()
    """Per rollout its GPUs: `[0, 1]` is one each, `[[0, 1]]` two for one."""
    scorer: PerProcess = ()
    """For each scorer the numbers of its GPUs."""


class LaunchConfig(Section):
    """Processes that `prefixrl launch` starts on this machine."""

    learner_ranks: Positive = 1
    """Ranks of the learner."""
    rollouts: Positive = 1
    """Rollouts that `prefixrl launch` starts."""
    scorers: Positive = 1
    """Scorers that `prefixrl launch` starts."""
    stop_s: PositiveFloat | None = None
    """Seconds for the learner to save after Ctrl-C. Absent: 60, and more for large checkpoints."""
    stall_s: PositiveFloat = 600.0
    """Time without any result, trained iteration or published version after which the console names who holds the run
    up. Longer than one iteration trains."""
    on_stall: Literal["warn", "end"] = "warn"
    """Effect of such a stall: only words, or the end of the launch with exit code 5."""
    devices: DevicesConfig = DevicesConfig()


SBATCH_OPTIONS = {
    "array",
    "cpus-per-task",
    "dependency",
    "error",
    "gpus-per-node",
    "gpus-per-task",
    "job-name",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "no-requeue",
    "signal",
}
"""Options of sbatch that `prefixrl slurm` sets itself."""


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be one line of printable characters")
    return text


def _own_free(option: str) -> str:
    name = option.removeprefix("--").partition("=")[0].partition(" ")[0]
    if not option.startswith("--") or not name:
        raise ValueError('not a long option of sbatch such as "--qos=high"')
    if name in SBATCH_OPTIONS:
        raise ValueError(
            f"prefixrl slurm sets --{name} itself, from the other keys of [slurm] and from [launch]"
        )
    return option


Word = Annotated[str, Field(pattern=r"^[^\s'\"\\#]+$")]
Time = Annotated[
    str,
    # 12:00:00 is a time of day in TOML, and 90 a number.
    BeforeValidator(lambda value: str(value) if isinstance(value, int | datetime.time) else value),
    Field(pattern=r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d\d?(:\d\d){0,2})$"),
]
Lines = Several[Annotated[str, AfterValidator(_one_line)]]
Options = Several[Annotated[str, AfterValidator(_own_free), AfterValidator(_one_line)]]


class SlurmRole(Section):
    """The resources of each process of one role."""

    partition: Word | None = None
    """Absent: `slurm.partition`."""
    time: Time | None = None
    """Absent: `slurm.time`."""
    cpus: Positive | None = None
    """CPU cores of each process. Absent: 8 for a learner rank, 4 for an engine, 1 where none is loaded; a scorer has
    `scorer.verifier_children` more."""
    memory_gib: NonNegative | None = None
    """Memory of each process. Absent: forecast from the models and devices; 0 asks for none, which is the site's
    default."""
    gpus: NonNegative | None = None
    """Absent: the GPUs over which the engine is spread, 1 for a learner rank, 0 where the device is cpu or no model is
    loaded."""
    gpu_type: Word | None = None
    """Name of the site for a kind of GPU, for example "h100". Absent: any."""
    sbatch: Options = ()
    """Further options of sbatch for the jobs of this role."""


class SlurmLearner(SlurmRole):
    """Resources of the learner's ranks."""

    nodes: Positive = 1
    """Nodes over which `launch.learner_ranks` are spread evenly."""


class SlurmConfig(Section):
    """Jobs of a run; how many processes there are is in `[launch]`."""

    account: Word | None = None
    """Account that the jobs are charged to."""
    partition: Word | None = None
    """Absent, like the account and the time: the site's default."""
    time: Time | None = None
    """Time limit in SLURM's format, for example "1-12:00:00". A job that reaches it saves and is queued again."""
    activate: Lines = ()
    """Shell lines that make `prefixrl-learner` and its kin available on a node, for example "module load cuda". Absent:
    the environment from which the jobs are submitted."""
    sbatch: Options = ()
    """Further options of sbatch for all jobs, for example "--qos=high"."""
    warn_s: Positive = 300
    """Time before the time limit at which a job is asked to save and leave."""
    restarts: NonNegative = 10
    """Restarts of a role that crashes, within one job."""
    learner: SlurmLearner = SlurmLearner()
    rollout: SlurmRole = SlurmRole()
    scorer: SlurmRole = SlurmRole()
