"""A run as jobs of SLURM: `prefixrl slurm` and `prefixrl scale` (docs/slurm.md).

    learner job ── RUN/endpoint ──▶ array of rollouts, arrays of scorers     (layout arrays)
    one heterogeneous job: learner | rollouts | scorers                      (layout het)

script.py     the text of every job script, from the config alone
templates     the form of a job script, and its shell functions: signals, restarts, requeue
scheduler.py  calls of sbatch, squeue and scancel
jobs.py       `RUN/slurm`: the scripts of a run, and what was submitted
submit.py     `prefixrl slurm`
scale.py      `prefixrl scale`
kubernetes.py `prefixrl kubernetes`: the same processes as Jobs of Kubernetes, or in a task of SkyPilot
"""
