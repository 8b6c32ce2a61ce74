"""The processes behind `prefixrl eval`, `generate`, `warm-start` and `doctor`.

plan_runner.py       reads the plan, starts a broker that trains nothing, carries the plan out
eval_command.py      judges adapters on problems
generate_command.py  answers problems
warm_start.py        trains an adapter on beginnings of right answers
doctor.py            what a run needs of its host
"""
