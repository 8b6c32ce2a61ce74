"""The process behind `prefixrl eval` and `prefixrl generate`.

plan_runner.py       reads the plan, starts a broker that trains nothing, carries the plan out
eval_command.py      judges adapters on problems
generate_command.py  answers problems
"""
