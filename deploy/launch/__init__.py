"""`prefixrl launch` and `prefixrl resume`: the processes of a run on one machine.

command.py         `prefixrl launch` and its `--check`
launch.py          starts, watches and restarts the children of a run
endpoint_trial.py  the trial of a served target, before anything is started
child_process.py   one child and its log
offline_plan.py    the plan of `prefixrl eval` and `prefixrl generate`, and its launch
resume.py          `prefixrl resume`, and the settings that it may change
"""
