"""A run as jobs of SLURM: `prefixrl slurm` and `prefixrl scale` (docs/slurm.md).

    learner job ── RUN/endpoint ──▶ array of rollouts, arrays of scorers     (layout arrays)
    one heterogeneous job: learner | rollouts | scorers                      (layout het)

script.py     the text of every job script, from the config alone
supervise.sh  the shell functions in every script: signals, restarts, requeue
scheduler.py  calls of sbatch, squeue and scancel
jobs.py       `RUN/slurm`: the scripts of a run, and what was submitted
submit.py     `prefixrl slurm`
scale.py      `prefixrl scale`
"""
