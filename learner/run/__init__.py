"""The run directory as its learner uses it: its lock, its files, the forecast before it.

alarms.py            alarms about a run that learns nothing any more; pure
directory.py         adoption and lock of a run directory, settings and inputs that must not change
iteration_time.py    its seconds at declared speeds
batch_fractions.py   fractions of a batch
metrics.py           `metrics.jsonl` and `advantages.jsonl`
tracking.py          the process that shows metrics elsewhere
summary.py           `summary.json`
retention.py         checkpoints that stay, and the link to the best
uploads.py           a command for every complete checkpoint
"""
