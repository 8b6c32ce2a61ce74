"""The processes behind `prefixrl eval`, `prefixrl generate` and `prefixrl doctor`.

plan_runner.py       reads the plan, starts a broker that trains nothing, carries the plan out
eval_command.py      judges adapters on problems
generate_command.py  answers problems
doctor.py            what a run needs of its host
"""
