"""A model of a running system, checked against measured runs (docs/scale.md). Pure.

system.py      roles, times, links and costs, as a user knows or measures them
rules.py       the broker's window and admission, asked with counts of groups
seating.py     workers and their seats, and who gets the next task
simulation.py  the run of a system, event by event
outlook.py     figures of simulated runs, and the part that holds a system up
"""
