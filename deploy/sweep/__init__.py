"""Many runs from one file: `prefixrl sweep` (docs/sweeps.md).

grid.py      the sweep file: indices, settings and directories of its runs; pure but for reading
conduct.py   the runs in sequence, one of them, or an array of SLURM jobs
outcome.py   the table of all runs, and means over seeds
"""
