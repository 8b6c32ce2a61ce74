"""`prefixrl launch`, `resume`, `replay` and `warm-start`: the processes of a run on one machine.

command.py         `prefixrl launch` and its `--check`
launch.py          starts, watches and restarts the children of a run
endpoint_trial.py  the trial of a served target, before anything is started
child_process.py   one child and its log
offline_plan.py    the plan of `prefixrl eval` and `prefixrl generate`, and its launch
warm_start_command.py  `prefixrl warm-start`: answers of the target, then the training on them
replay_command.py  `prefixrl replay`: its plan, and the learner alone
resume.py          `prefixrl resume`, and the settings that it may change
"""
