"""The commands of `prefixrl` in the groups of its help, and the small ones, one file each.

A command is imported when it is called, so that `--help` is quick. Packages add commands by the entry point
`prefixrl.commands`: a `click.Command`, listed last, which cannot take the name of one of these.

init.py              `prefixrl init`: prints a run file, with the values of tables/recipes.toml
config.py            `prefixrl config`: explains the keys of a run file
trials.py            `prefixrl try-loss` and `try-reward`
docs.py              `prefixrl docs` and `prefixrl completion`
status_command.py    `prefixrl status`
list_command.py      `prefixrl list` and `prefixrl compare`
stop_and_drain.py    `prefixrl stop` and `prefixrl workers`
logs.py              `prefixrl logs`
keygen.py            `prefixrl keygen` and `prefixrl worker-command`
eval_command.py      `prefixrl eval`
generate_command.py  `prefixrl generate`
python_api.py        `prefixrl.Run` and `prefixrl.launch`: a run from Python
"""

from collections.abc import Mapping

from prefixrl.common.config.foreign.plugins import plugins

Group = Mapping[str, tuple[str, str]]
"""Commands by name: `module:attribute` of the `click.Command`, and what `prefixrl --help` says of it."""

GROUPS: Mapping[str, Group] = {
    "Train": {
        "init": ("prefixrl.deploy.commands.init:init_command", "Print a run file to begin with."),
        "example": (
            "prefixrl.deploy.commands.docs:example",
            "Copy an example that comes with prefixrl, or list them.",
        ),
        "doctor": (
            "prefixrl.deploy.launch.command:doctor_command",
            "Check what this host has and lacks for a run.",
        ),
        "launch": (
            "prefixrl.deploy.launch.command:launch_command",
            "Run learner, rollouts and scorers on this machine; resume a run.",
        ),
        "warm-start": (
            "prefixrl.deploy.launch.warm_start_command:warm_start_command",
            "Teach an adapter the beginnings of right answers before a run.",
        ),
        "resume": ("prefixrl.deploy.launch.resume:resume", "Resume a run with changed settings."),
        "stop": (
            "prefixrl.deploy.commands.stop_and_drain:stop_command",
            "Have a run save and stop, on whatever host it is.",
        ),
        "replay": (
            "prefixrl.deploy.launch.replay_command:replay_command",
            "Train on a run's samples again, with other settings of the learner.",
        ),
        "sweep": (
            "prefixrl.deploy.sweep.conduct:sweep_command",
            "Run every combination of settings in a file.",
        ),
    },
    "Look": {
        "status": (
            "prefixrl.deploy.commands.status_command:status",
            "Show the state of a run and its bottleneck, or how it ended.",
        ),
        "dashboard": (
            "prefixrl.deploy.view.dashboard:dashboard_command",
            "Show runs in a browser: live curves, pipeline, samples.",
        ),
        "report": (
            "prefixrl.deploy.runs.report:report",
            "Write the pages of a run's results and print its table.",
        ),
        "samples": (
            "prefixrl.deploy.runs.samples:samples_command",
            "Print what the adapter writes.",
        ),
        "inspect": (
            "prefixrl.deploy.runs.inspect:inspect_command",
            "List or check every trained group of a run.",
        ),
        "headroom": (
            "prefixrl.deploy.examples.headroom:main",
            "Print what fixed prefixes earn, and the best of them for each problem.",
        ),
        "logs": (
            "prefixrl.deploy.commands.logs:logs",
            "Print the newest lines of the logs of a run.",
        ),
        "list": ("prefixrl.deploy.commands.list_command:list_runs", "List the runs in a folder."),
        "compare": ("prefixrl.deploy.commands.list_command:compare", "Show runs side by side."),
        "export": (
            "prefixrl.deploy.runs.export:export_command",
            "Write the metrics of a run as a table.",
        ),
        "track": (
            "prefixrl.deploy.track.command:track_command",
            "Send the metrics of a run to TensorBoard, Weights & Biases or another tracker.",
        ),
    },
    "Use what was trained": {
        "eval": (
            "prefixrl.deploy.commands.eval_command:eval_command",
            "Judge the adapters of runs, and arms to compare them with.",
        ),
        "generate": (
            "prefixrl.deploy.commands.generate_command:generate_command",
            "Answer problems with an adapter and its target.",
        ),
        "serve": (
            "prefixrl.deploy.serve.serve_command:serve",
            "Serve an adapter and its target on OpenAI's HTTP interface.",
        ),
    },
    "Clusters and other hosts": {
        "slurm": ("prefixrl.deploy.slurm.submit:slurm_command", "Run a run as SLURM jobs."),
        "scale": (
            "prefixrl.deploy.slurm.scale:scale_command",
            "Change the number of rollouts or scorers of a run on SLURM.",
        ),
        "kubernetes": (
            "prefixrl.deploy.slurm.kubernetes:kubernetes_command",
            "Print a run as Jobs of Kubernetes, or a task of SkyPilot.",
        ),
        "worker-command": (
            "prefixrl.deploy.commands.keygen:worker_command",
            "Print the command that starts a worker on another host.",
        ),
        "workers": (
            "prefixrl.deploy.commands.stop_and_drain:workers_command",
            "List the workers of a running run, or drain one.",
        ),
        "keygen": (
            "prefixrl.deploy.commands.keygen:keygen",
            "Add or remove a key of a run; list the keys.",
        ),
    },
    "Settings and your own code": {
        "config": (
            "prefixrl.deploy.commands.config:config_command",
            "Explain a key or section of the run file.",
        ),
        "docs": ("prefixrl.deploy.commands.docs:docs", "Print a page of the documentation."),
        "show": (
            "prefixrl.deploy.runs.show:show_command",
            "Show the text and tokens that adapter and target see of a question.",
        ),
        "try-loss": (
            "prefixrl.deploy.commands.trials:try_loss",
            "Try a loss function of your own, its gradient in float64 too.",
        ),
        "try-reward": (
            "prefixrl.deploy.commands.trials:try_reward",
            "Try a reward on right, wrong and hostile answers, and on those of a run.",
        ),
        "completion": (
            "prefixrl.deploy.commands.docs:completion",
            "Print the script by which a shell completes commands and options.",
        ),
    },
}

GONE: Mapping[str, str] = {
    "advise": "`prefixrl status RUN` has a line that names the bottleneck of a run",
    "systemd": "`prefixrl example systemd` copies unit files, and `prefixrl docs systemd` says how to use them",
}
"""Commands of earlier releases, and what takes their place."""

COMMANDS: Group = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def groups_with_plugins() -> Mapping[str, Group]:
    """Return all groups; commands of installed packages are the last one."""
    added = {
        name: (plugin.target, f"A command of the package {plugin.package}.")
        for name, plugin in plugins("commands").items()
    }
    return {**GROUPS, "Of other packages": added} if added else GROUPS
