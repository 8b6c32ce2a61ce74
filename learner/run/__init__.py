"""The run directory as its learner writes it.

directory.py   adoption and lock of the directory; settings and inputs that must not change
metrics.py     `metrics.jsonl` and `advantages.jsonl`
fractions.py   the fractions of a batch, from its groups; pure
alarms.py      alarms about a run that learns nothing any more; pure
collapse.py    decides on an answer to a policy that collapses; pure
collapse_answers.py  carries the answers out on every rank
summary.py     `summary.json`
spending.py    the end of a run by its cost
retention.py   checkpoints that stay, and the link to the best
uploads.py     a command for every complete checkpoint
stop.py        what ends a wait: a stop, or a server that ended for good
tracking.py    the process that shows metrics elsewhere
"""
