"""Metrics and samples of a run in other programs: `prefixrl track`, one file for each tracker.

command.py      the process that sends what is new in `metrics.jsonl` until the run ends
tracker.py      what a tracker is: a record, by which packages add others, and the run that it opens
trackers.py     all trackers by name
tensorboard.py  event files in the run directory
wandb.py        Weights & Biases, and trackio, which has the same calls
mlflow.py       MLflow
"""
