"""The text of every job script: options of sbatch, an environment, the roles to supervise.

It follows from the config alone; nothing here asks the scheduler. `templates/job.sbatch.j2` is the form of a script.
"""

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.launch import SlurmRole
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.placement import processes_of
from prefixrl.common.host.template import rendered
from prefixrl.common.wire.address import is_on_this_host
from prefixrl.common.worker.allowed import flags as allowances
from prefixrl.common.worker.command import set_flags

Role = Literal["learner", "rollout", "scorer"]
Worker = Literal["rollout", "scorer"]
Script = Literal["learner", "rollout", "scorer", "run", "sweep"]
"""A job script: the job of a role, the heterogeneous job `run`, or the array of whole runs `sweep`."""
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
        """The endpoint of the broker: the configured endpoint, else every interface, for jobs on other nodes."""
        broker = self.config.broker
        return broker.listen if "listen" in broker.model_fields_set else ANY_INTERFACE

    @property
    def is_alone(self) -> bool:
        """True if no worker on another node can reach the broker."""
        return is_on_this_host(self.listen)

    def processes(self, role: Role) -> int:
        """Return the number of processes that the run file has for a role."""
        launch = self.config.launch
        counts = {"learner": launch.learner_ranks, "rollout": launch.rollouts}
        return counts.get(role, launch.scorers)

    def section(self, role: Role) -> SlurmRole:
        """Return the role's part of `[slurm]`."""
        section: SlurmRole = getattr(self.config.slurm, role)
        return section

    def gpus(self, role: Role) -> int:
        """Return the GPUs of each process of a role."""
        gpus = self.section(role).gpus
        return self.config.gpus_of(role) if gpus is None else gpus

    def cpus(self, role: Role) -> int:
        """Return the cores of each process of a role."""
        if (cpus := self.section(role).cpus) is not None:
            return cpus
        children = self.config.verifier_children() if role == "scorer" else 0
        return self.config.own_cores(role) + children

    @property
    def gpus_of_all(self) -> int:
        """Return the fewest GPUs for the whole run: `prefixrl launch` puts rollouts on the GPUs of the learner."""
        processes = processes_of(self.config)
        gpus = sum(self.processes(role) * self.gpus(role) for role in ROLES)
        if self.gpus("learner"):
            gpus -= sum(each.is_guest and each.chosen_gpus is None for each in processes)
        return max([gpus, *(gpu + 1 for each in processes for gpu in each.chosen_gpus or ())])

    def command(self, role: Role) -> list[str]:
        """Return the command of one process."""
        if role != "learner":
            allowed = allowances(self.config) if role == "scorer" else []
            return [f"prefixrl-{role}", "--run", str(self.directory), *allowed]
        settings = self.settings
        if "listen" not in self.config.broker.model_fields_set:
            settings += (f"broker.listen={self.listen}",)
        flags = set_flags((*settings, f"directory={self.directory}"))
        return ["prefixrl-learner", str(self.run_file), *flags]

    def log(self, name: str, folder: str = "logs") -> str:
        """Return the option with a log's path; percent signs of its folder are escaped."""
        path = str(self.directory / folder)
        if "\\" in path or not path.isprintable():
            raise ConfigError(
                f"directory = {path!r}: SLURM cannot write a log below a folder whose name has a backslash or a line "
                "break; choose another directory (--set directory=...)"
            )
        return f"--output={path.replace('%', '%%')}/{name}"


def job_name(directory: Path, role: Script) -> str:
    """Return the name of a script's jobs in the queue: readable, and of this run alone."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", directory.name)[:_MOST_NAME_CHARS]
    return f"{role}.{readable}-{digest}"


# --- scripts --------------------------------------------------------------------------------------------------------


def arrays(run: RunOnSlurm) -> dict[Role, str]:
    """Return one script per role: a job of the learner, an array of each kind of worker."""
    scripts: dict[Role, str] = {}
    for role in ROLES:
        is_learner = role == "learner"
        count = run.processes(role)
        tasks, log = (count, f"{role}.log") if is_learner else (1, f"{role}-%A_%a.log")
        resources = _resources(run, role, tasks)
        array = [] if is_learner else [f"--array=0-{count - 1}"]
        options = [*_options_of_job(run, role, run.log(log)), *_site(run, role), *resources, *array]
        scripts[role] = _script(run, [options], {role: _step(role, resources, run.command(role))})
    return scripts


def heterogeneous(run: RunOnSlurm) -> str:
    """Return the script of one job with a group of nodes per role."""
    groups = []
    steps = {}
    for group, role in enumerate(ROLES):
        count = run.processes(role)
        common = _options_of_job(run, "run", run.log("slurm-%j.log")) if group == 0 else []
        groups.append([*common, *_site(run, role), *_resources(run, role, count)])
        # Each worker is a step of its own on a part of the group: after a crash it alone is started again.
        names = [role] if role == "learner" else [f"{role}-{worker}" for worker in range(count)]
        for name in names:
            placed = [f"--het-group={group}", run.log(f"{name}.log"), "--open-mode=append"]
            placed += (
                _resources(run, role, count)
                if role == "learner"
                else ["--exact", *_resources(run, role, 1)]
            )
            key = name.replace("-", "_")
            steps[key] = _step(key, placed, run.command(role))
    return _script(run, groups, steps)


def whole_runs(run: RunOnSlurm, configs: Sequence[RunConfig], command: Sequence[str]) -> str:
    """Return the script of an array whose every task is a whole run on one node.

    The task's number is the last argument of the command; the largest run decides the resources.
    """
    alike = [replace(run, config=config) for config in configs]
    cpus = max(sum(each.processes(role) * each.cpus(role) for role in ROLES) for each in alike)
    gpus = max(each.gpus_of_all for each in alike)
    memory = max(
        sum(each.processes(role) * (each.section(role).memory_gib or 0) for role in ROLES)
        for each in alike
    )
    resources = ["--ntasks=1", "--nodes=1", f"--cpus-per-task={cpus}"]
    resources += _gpu_options(run, "learner", "node", gpus)
    if memory:
        resources.append(f"--mem={memory}G")
    options = [
        *_options_of_job(run, "sweep", run.log("%A_%a.log", "slurm")),
        *_site(run, "learner"),
        *resources,
        f"--array=0-{len(configs) - 1}",
    ]
    step = _step("learner", resources, command)
    return _script(run, [options], {"learner": f'{step} "$SLURM_ARRAY_TASK_ID"'})


def _gpu_options(run: RunOnSlurm, role: Role, per: str, count: int) -> list[str]:
    """Return the option that asks for GPUs `per` node or task, none for 0 GPUs."""
    kind = run.section(role).gpu_type
    return [f"--gpus-per-{per}={f'{kind}:' if kind else ''}{count}"] if count else []


def _options_of_job(run: RunOnSlurm, role: Script, log: str) -> list[str]:
    warning = f"--signal=B:USR1@{run.config.slurm.warn_s}"
    return [f"--job-name={run.job_name(role)}", log, "--open-mode=append", "--requeue", warning]


def _site(run: RunOnSlurm, role: Role) -> list[str]:
    slurm = run.config.slurm
    section = run.section(role)
    partition = section.partition or slurm.partition
    time = section.time or slurm.time
    options = {"account": slurm.account, "partition": partition, "time": time}
    given_options = [f"--{key}={value}" for key, value in options.items() if value]
    return [*given_options, *slurm.sbatch, *section.sbatch]


def _resources(run: RunOnSlurm, role: Role, tasks: int) -> list[str]:
    """Return the options that sbatch and srun both need: releases differ in what they inherit."""
    section = run.section(role)
    gpus = run.gpus(role)
    cpus = run.cpus(role)
    nodes = run.config.slurm.learner.nodes
    options = [f"--ntasks={tasks}", f"--cpus-per-task={cpus}"]
    if role == "learner":
        if tasks % nodes:
            raise ConfigError(
                f"launch.learner_ranks = {tasks} with slurm.learner.nodes = {nodes}: the ranks cannot be spread "
                "evenly; choose a number of ranks that the number of nodes divides"
            )
        options += [f"--nodes={nodes}", f"--ntasks-per-node={tasks // nodes}"]
        # Per node, not per task: ranks that see each other's GPUs copy between them directly.
        options += _gpu_options(run, role, "node", gpus * tasks // nodes)
    else:
        options += _gpu_options(run, role, "task", gpus)
    if section.memory_gib:
        options.append(f"--mem-per-cpu={-(-section.memory_gib * 1024 // cpus)}M")
    return options


def _step(name: str, options: Sequence[str], command: Sequence[str]) -> str:
    """Return the shell command that becomes the step of a role, or of one worker of it."""
    return shlex.join(["step", name, *options, "--", *command])


def _script(run: RunOnSlurm, groups: Sequence[Sequence[str]], steps: dict[str, str]) -> str:
    """Return a script of commands by name; the job depends on the first. `groups` are options of sbatch by part."""
    return rendered(
        "prefixrl.deploy.slurm",
        "templates/job.sbatch.j2",
        groups=[map(_quoted, options) for options in groups],
        alone=run.listen if run.is_alone else "",
        activate=run.config.slurm.activate
        or [f'export PATH={shlex.quote(str(run.programs))}:"$PATH"'],
        run=shlex.quote(str(run.directory)),
        learner_names=shlex.quote(f"{run.job_name('learner')},{run.job_name('run')}"),
        restarts=run.config.slurm.restarts,
        steps=steps,
    )


def _quoted(option: str) -> str:
    """Quote the value of an option; sbatch reads quotes as a shell does."""
    name, separator, value = option.partition("=")
    return f"{name}{separator}{shlex.quote(value)}" if separator else name
