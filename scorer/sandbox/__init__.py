"""Programs that models wrote, run where they can do no harm.

programs.py    which text is a program, how it is called, the tests it passes; around it is what programs.toml has
comparison.py  whether what it printed or returned is what is expected
runner.py      `run`: a program to its end, from outside
child.py       the process inside: namespaces, seccomp filter, limits; system_calls.txt has what the filter lets through
"""
