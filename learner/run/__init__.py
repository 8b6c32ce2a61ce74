"""The run directory as its learner uses it: its lock, its files, the forecast before it.

alarms.py            alarms about a run that learns nothing any more; pure
directory.py         adoption and lock of a run directory, settings and inputs that must not change
forecast.py          figures that `--check` prints
batch_fractions.py   fractions of a batch
metrics.py           `metrics.jsonl` and `advantages.jsonl`
summary.py           `summary.json`
"""
