"""`--check`: what a config will need, printed before the run begins.

report.py        the text of `--check`
budget.py        memory of each process, beside the memory of its device
footprint.py     bytes of a learner rank and of an engine; pure
shares.py        shares of a GPU with several processes
host_memory.py   memory of the host, for batch systems
plugged_in.py    members that installed packages add: listed, and loaded
loadable.py      models that are here: can they be loaded?
model_shapes.py  shapes and sizes of models that are not loaded, the published ones from shapes.toml
spending.py      requests, tokens and cost of a target behind an endpoint
tried_answers.py answers with which a reward is tried; pure
reward_trial.py  the trial of a reward: calls, faults, the table
disk_room.py     room for checkpoints and versions on the disk
"""
