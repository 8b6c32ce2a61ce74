"""The processes behind `prefixrl eval` and `prefixrl generate`.

serving.py           the start of such a process, with a broker that trains nothing
eval_command.py      judges adapters on problems
generate_command.py  answers problems
"""
