"""The text of every job script: options of sbatch, an environment, the roles to supervise.

It follows from the config alone. Nothing here asks the scheduler; the only file read is that of the shell functions,
which every script carries.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.slurm import SlurmRole
from prefixrl.common.errors import ConfigError
from prefixrl.common.wire.address import is_on_this_host
from prefixrl.common.worker.allowed import flags as allowances

Role = Literal["learner", "rollout", "scorer"]
Worker = Literal["rollout", "scorer"]
Script = Literal["learner", "rollout", "scorer", "run", "sweep"]
"""A job script: that of one role, `run`, the heterogeneous job, or `sweep`, an array of whole runs."""
ROLES: tuple[Role, ...] = ("learner", "rollout", "scorer")
WORKERS: tuple[Worker, ...] = ("rollout", "scorer")
ANY_INTERFACE = "tcp://0.0.0.0:0"
_MOST_NAME_CHARS = 40


@dataclass(frozen=True)
class RunOnSlurm:
    """One run and the place from which its jobs are submitted."""

    config: RunConfig
    run_file: Path
    settings: tuple[str, ...]
    """The `--set` of the command line; they go to the learner."""
    programs: Path
    """Folder of the commands that submit; the jobs use it where `slurm.activate` is empty."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.config.directory)

    def job_name(self, role: Script) -> str:
        """Return the name of a script's jobs, which no other run has."""
        return job_name(self.directory, role)

    @property
    def listen(self) -> str:
        """The endpoint of the broker: the given one, else every interface, for jobs on other nodes."""
        return self.config.broker.listen if self.is_listen_given else ANY_INTERFACE

    @property
    def is_listen_given(self) -> bool:
        """True if the run file or a setting has `broker.listen`."""
        return "listen" in self.config.broker.model_fields_set

    @property
    def is_alone(self) -> bool:
        """True if no worker on another node can reach the broker."""
        return is_on_this_host(self.listen)

    def processes(self, role: Role) -> int:
        """Return the number of processes that the run file has for a role."""
        launch = self.config.launch
        return {"learner": launch.learner_ranks, "rollout": launch.rollouts, "scorer": launch.scorers}[role]

    def section(self, role: Role) -> SlurmRole:
        """Return the role's part of `[slurm]`."""
        slurm = self.config.slurm
        return {"learner": slurm.learner, "rollout": slurm.rollout, "scorer": slurm.scorer}[role]

    def gpus(self, role: Role) -> int:
        """Return the GPUs of each process of a role."""
        given = self.section(role).gpus
        return self.config.gpus_of(role) if given is None else given

    def command(self, role: Role) -> list[str]:
        """Return the command of one process."""
        if role != "learner":
            allowed = allowances(self.config) if role == "scorer" else []
            return [f"prefixrl-{role}", "--run", str(self.directory), *allowed]
        own = () if self.is_listen_given else (f"broker.listen={self.listen}",)
        settings = (*self.settings, *own, f"directory={self.directory}")
        return ["prefixrl-learner", str(self.run_file), *(part for each in settings for part in ("--set", each))]


def job_name(directory: Path, role: Script) -> str:
    """Return the name of a script's jobs in the queue: readable, and of this run alone."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", directory.name)[:_MOST_NAME_CHARS]
    return f"{role}.{readable}-{digest}"


def arrays(run: RunOnSlurm) -> dict[Role, str]:
    """Return one script per role: a job of the learner, an array of each kind of worker."""
    return {role: _own_job(run, role) for role in ROLES}


def whole_runs(run: RunOnSlurm, configs: Sequence[RunConfig], command: Sequence[str]) -> str:
    """Return the script of an array whose every task is a whole run on one node.

    The task's number is the last argument of the command; the largest run decides the resources.
    """
    alike = [replace(run, config=config) for config in configs]
    cpus = max(sum(each.processes(role) * each.section(role).cpus for role in ROLES) for each in alike)
    gpus = max(sum(each.processes(role) * each.gpus(role) for role in ROLES) for each in alike)
    memory = max(sum(each.processes(role) * (each.section(role).memory_gib or 0) for role in ROLES) for each in alike)
    kind = f"{run.section('learner').gpu_type}:" if run.section("learner").gpu_type else ""
    resources = ["--ntasks=1", "--nodes=1", f"--cpus-per-task={cpus}"]
    resources += [f"--gpus-per-node={kind}{gpus}"] * bool(gpus) + [f"--mem={memory}G"] * bool(memory)
    log = run.directory / "slurm" / "%A_%a.log"
    options = [*_options_of_job(run, "sweep", log), *_site(run, "learner"), *resources]
    directives = _directives([*options, f"--array=0-{len(configs) - 1}"])
    step = shlex.join(["step", "learner", *resources, "--", *command])
    return _script(run, directives, {"learner": f'start_learner() {{\n  {step} "$SLURM_ARRAY_TASK_ID"\n}}'})


def heterogeneous(run: RunOnSlurm) -> str:
    """Return the script of one job with a group of nodes per role."""
    groups: list[str] = []
    starts: dict[str, str] = {}
    for number, role in enumerate(ROLES):
        count = run.processes(role)
        common = _options_of_job(run, "run", run.directory / "logs" / "slurm-%j.log") if number == 0 else []
        groups += ["#SBATCH hetjob"] * (number > 0)
        groups += _directives([*common, *_site(run, role), *_resources(run, role, count)])
        if role == "learner":
            starts[role] = _start(run, role, count, _placed(run, number, role))
            continue
        for worker in range(count):
            # A step of its own on a part of the group: if it crashes it is started again alone.
            placed = [*_placed(run, number, f"{role}-{worker}"), "--exact"]
            starts[f"{role}_{worker}"] = _start(run, role, 1, placed, f"{role}_{worker}")
    return _script(run, groups, starts)


def _own_job(run: RunOnSlurm, role: Role) -> str:
    count = run.processes(role) if role == "learner" else 1
    log = f"{role}.log" if role == "learner" else f"{role}-%A_%a.log"
    options = [*_options_of_job(run, role, run.directory / "logs" / log), *_site(run, role)]
    directives = _directives([*options, *_resources(run, role, count)])
    if role != "learner":
        directives += _directives([f"--array=0-{run.processes(role) - 1}"])
    return _script(run, directives, {role: _start(run, role, count)})


def _options_of_job(run: RunOnSlurm, role: Script, log: Path) -> list[str]:
    return [
        f"--job-name={run.job_name(role)}",
        f"--output={_pattern(log)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{run.config.slurm.warn_s}",
    ]


def _pattern(log: Path) -> str:
    """Return a log's path as SLURM reads it: the percent signs of its folder are no fields."""
    folder = str(log.parent)
    if "\\" in folder or not folder.isprintable():
        raise ConfigError(
            f"directory = {folder!r}: SLURM cannot write a log below a folder whose name has a backslash or a line "
            "break; choose another directory (--set directory=...)"
        )
    return f"{folder.replace('%', '%%')}/{log.name}"


def _site(run: RunOnSlurm, role: Role) -> list[str]:
    slurm, section = run.config.slurm, run.section(role)
    given = {
        "account": slurm.account,
        "partition": section.partition or slurm.partition,
        "time": section.time or slurm.time,
    }
    return [*(f"--{key}={value}" for key, value in given.items() if value), *slurm.sbatch, *section.sbatch]


def _resources(run: RunOnSlurm, role: Role, tasks: int) -> list[str]:
    """Return the options that sbatch and srun both need: releases differ in what they inherit."""
    section, gpus, nodes = run.section(role), run.gpus(role), run.config.slurm.learner.nodes
    options = [f"--ntasks={tasks}", f"--cpus-per-task={section.cpus}"]
    kind = f"{section.gpu_type}:" if section.gpu_type else ""
    if role == "learner":
        if tasks % nodes:
            raise ConfigError(
                f"launch.learner_ranks = {tasks} with slurm.learner.nodes = {nodes}: the ranks cannot be spread "
                "evenly; choose a number of ranks that the number of nodes divides"
            )
        options += [f"--nodes={nodes}", f"--ntasks-per-node={tasks // nodes}"]
        # Per node, not per task: ranks that see each other's GPUs copy between them directly.
        options += [f"--gpus-per-node={kind}{gpus * tasks // nodes}"] * bool(gpus)
    else:
        options += [f"--gpus-per-task={kind}{gpus}"] * bool(gpus)
    if section.memory_gib:
        options.append(f"--mem-per-cpu={-(-section.memory_gib * 1024 // section.cpus)}M")
    return options


def _directives(options: list[str]) -> list[str]:
    return [f"#SBATCH {_option(each)}" for each in options]


def _option(option: str) -> str:
    """Quote the value of an option; sbatch reads quotes as a shell does."""
    name, separator, value = option.partition("=")
    return f"{name}{separator}{shlex.quote(value)}" if separator else name


def _placed(run: RunOnSlurm, group: int, name: str) -> list[str]:
    """Return the options of a step of the heterogeneous job: its group of nodes and its log."""
    log = _pattern(run.directory / "logs" / f"{name}.log")
    return [f"--het-group={group}", f"--output={log}", "--open-mode=append"]


def _start(run: RunOnSlurm, role: Role, tasks: int, placed: Sequence[str] = (), name: str = "") -> str:
    """Return the shell function that becomes the step of a role, or of one worker of it."""
    name = name or role
    command = shlex.join(["step", name, *placed, *_resources(run, role, tasks), "--", *run.command(role)])
    return f"start_{name}() {{\n  {command}\n}}"


def _script(run: RunOnSlurm, directives: list[str], starts: Mapping[str, str]) -> str:
    """Return a script; its first step is the one on which the job depends."""
    slurm, alone = run.config.slurm, []
    if run.is_alone:
        alone = [f"# broker.listen = {run.listen}: only workers on the learner's own machine can join."]
    activate = slurm.activate or (f'export PATH={shlex.quote(str(run.programs))}:"$PATH"',)
    learner = f"{run.job_name('learner')},{run.job_name('run')}"
    functions = files(__package__).joinpath("supervise.sh").read_text(encoding="utf-8")
    parts = [
        "#!/bin/bash",
        *directives,
        "",
        *alone,
        *activate,
        "export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false",
        f"run={shlex.quote(str(run.directory))}",
        f"learner_names={shlex.quote(learner)}",
        f"restarts={slurm.restarts}",
        "",
        functions,
        *starts.values(),
        "",
        f"supervise {' '.join(starts)}",
        "",
    ]
    return "\n".join(parts)
