"""Metrics and samples of a run in other programs: `prefixrl track`, one file for each tracker.

command.py      the process that sends what is new in `metrics.jsonl` until the run ends
identity.py     the id of a run at a tracker, its config, imports of packages
tensorboard.py  event files in the run directory
wandb.py        Weights & Biases, and trackio, which has the same calls
mlflow.py       MLflow
"""
