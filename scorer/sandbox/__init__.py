"""Programs that models wrote, run where they can do no harm.

programs.py    which text is a program, how it is called, the tests it passes
drivers.py     functions around a program, inside: run it, print its value or what its function returns
boot.py        the first code of the interpreter inside
comparison.py  whether what it printed or returned is what is expected
runner.py      `run`: a program to its end, from outside
child.py       the process inside: namespaces, seccomp filter, limits; system_calls.txt has what the filter lets through
"""
