"""`prefixrl kubernetes`: a run as Jobs of Kubernetes, or as a task of SkyPilot (docs/kubernetes.md)."""

import re
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click

from prefixrl.common.config.foreign.user_function import is_file
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.template import rendered
from prefixrl.common.worker.allowed import needed
from prefixrl.common.worker.command import PATH, set_flags, settings_option
from prefixrl.deploy.slurm.script import ROLES, RunOnSlurm
from prefixrl.deploy.slurm.submit import run_on_slurm

OF_A_POD = "broker.listen=tcp://eth0:5555"


def in_pods(run: RunOnSlurm, mount: Path) -> RunOnSlurm:
    """Return a run with the paths of its pods, where `mount` is the run file's folder; raise ConfigError."""
    folder = run.run_file.parent
    function = run.config.reward.function

    def moved(key: str, text: str) -> str:
        path = Path(text)
        if not path.is_relative_to(mount) and not path.is_relative_to(folder):
            raise ConfigError(
                f"{key} = {text!r}: pods have {folder} alone, as {mount}; choose a path below either"
            )
        return text if path.is_relative_to(mount) else str(mount / path.relative_to(folder))

    if function and is_file(function):
        function = moved("reward.function", function)
    reward = run.config.reward.model_copy(update={"function": function})
    config = run.config.model_copy(
        update={"directory": moved("directory", run.config.directory), "reward": reward}
    )
    return replace(run, config=config, run_file=Path(moved("the run file", str(run.run_file))))


@click.command("kubernetes")
@click.argument("run_file", type=PATH)
@click.option("--image", help="Image of prefixrl, from a registry that the cluster reads.")
@click.option(
    "--claim",
    default="prefixrl",
    show_default=True,
    help="Claim of the volume that all pods mount.",
)
@click.option(
    "--mount",
    type=PATH,
    default="/shared",
    show_default=True,
    help="The run file's folder in the pods.",
)
@click.option(
    "--sky",
    metavar="GPU",
    help="Print a task of SkyPilot for one machine with this kind of GPU, e.g. H100.",
)
@settings_option
def kubernetes_command(
    run_file: Path,
    image: str | None,
    claim: str,
    mount: Path,
    sky: str | None,
    settings: tuple[str, ...],
) -> None:
    """Print the run of RUN_FILE as Jobs of Kubernetes, or as a task of SkyPilot."""
    if (image is None) == (sky is None) or not mount.is_absolute():
        raise ConfigError(
            "give --image IMAGE and an absolute --mount for Jobs of Kubernetes, or --sky GPU for SkyPilot"
        )
    run = run_on_slurm(run_file, (OF_A_POD, *settings) if image else settings)
    if image and run.is_alone:
        raise ConfigError(
            f"broker.listen = {run.listen!r}: workers in other pods cannot join; leave it out"
        )
    run = in_pods(run, mount) if image else run
    text = rendered(
        "prefixrl.deploy.slurm",
        f"templates/{'jobs' if image else 'sky'}.yaml.j2",
        run=run,
        slurm=run.config.slurm,
        roles=ROLES,
        names={each: re.sub(r"[._]+", "-", run.job_name(each)).lower() for each in ROLES},
        secrets=list(dict.fromkeys(needed(run.config).secrets)),
        image=image,
        claim=claim,
        mount=str(mount),
        gpu=sky,
        version=version("prefixrl"),
        words=shlex.join([run_file.name, *set_flags(settings)]),
    )
    click.echo(text, nl=False)
