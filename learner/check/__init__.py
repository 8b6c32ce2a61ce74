"""`--check`: what a config will need, told before it is spent.

report.py          the text of `--check`
budget.py          memory of each process, beside what its device has
footprint.py       bytes of a learner rank and of an engine; pure
shares.py          shares of a GPU where several processes are on it
process_model.py   memory of a scorer's process reward model
model_shapes.py    shapes and sizes of models that are not loaded
disk_room.py       room for checkpoints and versions on the disk
time.py            work of an iteration, and its seconds at declared speeds
prompt_lengths.py  tokens of a prompt: measured, else guessed
"""
