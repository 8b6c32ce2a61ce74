"""The commands of `prefixrl`, one file each.

advise.py            `prefixrl advise`: who holds a run up, and how many of whom would balance it
begin.py             the commands for who begins
config.py            `prefixrl config`: the keys of the run file, and the page that lists them
docs.py              `prefixrl docs`, `prefixrl completion`: pages of the documentation, and a shell's script
eval_command.py      `prefixrl eval`: judges adapters of runs, and arms to compare them with, on data sets
generate_command.py  `prefixrl generate`: answers problems with an adapter and its target, line for line
init.py              `prefixrl init`: a run file to begin with, by the size of the adapter (docs/training.md)
keygen.py            `prefixrl keygen`, `prefixrl worker-command`: keys, and a worker's way to a run
logs.py              `prefixrl logs`: the logs of a run's processes, by name or role
operate.py           the commands for runs that were started, of whoever looks after them
python_api.py        `prefixrl.Run` and `prefixrl.launch`: a run as an object, read from its directory alone
status_command.py    `prefixrl status`: a run that goes on from its broker, any other from its files
stop_and_drain.py    `prefixrl stop` and `prefixrl workers`: what an operator asks of a run's broker
"""
