"""The run directory as its learner uses it: its lock, its files, the forecast before it.

alarms.py            alarms about a run that learns nothing any more; pure
directory.py         adoption and lock of a run directory, settings and inputs that must not change
forecast.py          the text of `--check`
budget.py            its memory for a config, and what cannot fit
iteration_time.py    its seconds at declared speeds
prompt_lengths.py    tokens of a prompt: measured, else guessed
footprint.py         bytes of a learner rank and of an engine; pure
disk_room.py         room for checkpoints and versions on the disk
pace.py              work of an iteration and its seconds; pure
process_model.py     memory of a scorer's process reward model
shares.py            shares of a GPU where several processes are on it
model_shapes.py      shapes and sizes of models that are not loaded
batch_fractions.py   fractions of a batch
metrics.py           `metrics.jsonl` and `advantages.jsonl`
tracking.py          the process that shows metrics elsewhere
summary.py           `summary.json`
retention.py         checkpoints that stay, and the link to the best
uploads.py           a command for every complete checkpoint
"""
