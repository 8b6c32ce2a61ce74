"""The process behind `prefixrl doctor`: what a run needs of this host, a line for each; no model is loaded.

A check returns what it found, or raises an error that names the remedy.
"""

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from prefixrl.common.config.load import from_flags, load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.workers.engines import ENGINES
from prefixrl.common.engines.make import is_installed
from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.host.exit_codes import exit_codes, printable
from prefixrl.common.host.placement import gpus_here
from prefixrl.common.host.process import allow_many_files, own
from prefixrl.common.run.disk import in_mib
from prefixrl.common.wire.address import advertised, bindable, is_on_this_host
from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.learner.check.disk_room import check_room
from prefixrl.learner.check.plugged_in import loaded_plugins
from prefixrl.learner.run.directory import check_ports_are_free

SHARED, SHARED_BYTES, SHARED_BYTES_OF_GPUS = Path("/dev/shm"), 2**25, 2**30
"""Memory by which processes of one host talk, and its least free room: NCCL and vLLM take hundreds of MiB."""
ANY_RUN = {
    "directory": ".",
    "mode": "direct",
    "adapter": {"model": "any/model"},
    "data": {"train": "gsm8k", "epochs": 1},
}


def _cuda(config: RunConfig) -> str:
    import torch

    from prefixrl.common.host.cuda import driver, has_cuda

    used = [role for role in ("learner", "rollout", "scorer") if config.gpus_of(role)]
    if not any(
        [has_cuda("cuda" if gpus_here() else getattr(config, role).device, role) for role in used]
    ):
        return f"torch {torch.__version__} on the CPU"
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {gpus}; driver: {driver()}"


def _engines(config: RunConfig) -> str:
    """Say what works of the packages of engines that the run names, or that `auto` may take here."""
    words = []
    for name, record in ENGINES.items():
        is_asked = name in (config.rollout.engine, config.scorer.engine)
        is_possible = record.is_automatic and bool(gpus_here()) and is_installed(record)
        if record.check and (is_asked or is_possible):
            module, _, function = record.check.partition(":")
            words.append(f"{name} {getattr(importlib.import_module(module), function)()}")
    return "; ".join(words) or "no package is needed"


def _sandbox(config: RunConfig) -> str:
    program = "import sys; from prefixrl.scorer.sandbox.runner import probe; sys.exit(probe())"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if not finished.returncode:
        return "programs are isolated"
    if config.data.runs_programs:
        raise ConfigError(
            f"{finished.stderr.strip()}; allow user namespaces (docs/verification.md)"
        )
    return f"not used, and not possible: {finished.stderr.strip()}"


def _locks(config: RunConfig) -> str:
    directory = Path(config.directory).absolute()
    folder = next(filter(Path.is_dir, (directory, *directory.parents)))
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        own(Path(inner)).close()
    return f"{folder} has them"


def _shared_memory(_config: RunConfig) -> str:
    free = shutil.disk_usage(SHARED).free
    least = SHARED_BYTES_OF_GPUS if gpus_here() else SHARED_BYTES
    if free < least:
        raise ConfigError(
            f"{in_mib(free)} are free and {in_mib(least)} needed; a container gets more by --shm-size=8g"
        )
    return f"{in_mib(free)} are free"


def _broker(config: RunConfig) -> str:
    check_ports_are_free(config.broker.listen)
    if is_on_this_host(config.broker.listen):
        return f'{config.broker.listen}, for this host alone; broker.listen = "tcp://0.0.0.0:0" lets others join'
    return f"other hosts must reach {advertised(bindable(config.broker.listen))} (port 0: any)"


CHECKS: dict[str, Callable[[RunConfig], str | None]] = {
    "CUDA": _cuda,
    "engines": _engines,
    "plug-ins": lambda _: "; ".join(loaded_plugins()) or "none is installed",
    "sandbox": _sandbox,
    "file locks": _locks,
    "/dev/shm": _shared_memory,
    "broker": _broker,
    "disk": check_room,
    "open files": lambda _: allow_many_files(),
}


@click.command()
@click.argument("run_file", type=PATH, required=False)
@settings_option
def main(run_file: Path | None, settings: tuple[str, ...]) -> None:
    """Tell what this host has and lacks for the run described by RUN_FILE, or for any."""
    with exit_codes():
        config = load(run_file, settings) if run_file else from_flags(ANY_RUN, settings)
        is_fit = True
        for name, check in CHECKS.items():
            try:
                line = f"ok   {name}: {check(config) or 'enough'}"
            except (UserError, OSError) as error:
                line = f"not  {name}: {error}"
                is_fit = False
            click.echo(printable(line))
        raise SystemExit(0 if is_fit else ConfigError.exit_code)


if __name__ == "__main__":
    main()
