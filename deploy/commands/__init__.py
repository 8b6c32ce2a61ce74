"""The small commands of `prefixrl`, one file each.

command_groups.py    all commands in their groups: where each is defined, and its sentence in --help
init.py              `prefixrl init`: prints a run file, with the values of tables/recipes.toml
config.py            `prefixrl config`: explains the keys of a run file; `prefixrl try-loss`
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
