"""Programs that models wrote, run where they can do no harm.

programs.py  which text is a program, how it is called, whether its result is right
runner.py    `run`: a program to its end, from outside
child.py     the process inside: namespaces, seccomp filter, limits
"""
