"""The learner's side of `prefixrl eval` and `prefixrl generate`.

eval_command.py      the process behind `prefixrl eval`, started beside its workers
generate_command.py  the process behind `prefixrl generate`, started beside its workers
serving.py           the start of a process that asks for answers
"""
