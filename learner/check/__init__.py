"""`--check`: what a config will need, before it is spent.

budget.py          memory of a config, beside what its devices have
disk_room.py       room that checkpoints and versions of the weights take on a run's disk
footprint.py       bytes that one learner rank and one engine take on their device
model_shapes.py    shapes and sizes of models before they are loaded
process_model.py   device memory of a scorer's process reward model, which lies on the scorer's first GPU
prompt_lengths.py  length of a run's prompts before it begins
report.py          figures that follow from a config alone
shares.py          shares of a GPU's memory where several models of a run are on it
time.py            work of an iteration, and the seconds it takes at declared speeds
"""
