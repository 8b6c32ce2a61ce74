"""Workers, their leases, tasks and versions.

dispatch.py    tasks for workers, and the effect of results and losses on ledger and evaluations
identity.py    the check that a worker loaded the run's model, tokenizer, template and published weights
limits.py      most that a group may hold in a run, by its config and the adapter's model
proofs.py      the proof that an engine computes with a version
registry.py    the connected workers
takers.py      the workers of one role in the order in which they get tasks
task_names.py  names of tasks that prove which worker was given what
versions.py    versions
workers.py     workers of a run, their leases and free rows
"""
