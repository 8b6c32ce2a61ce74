"""The start of every worker, and its connection to the broker.

command.py  the command line of a worker, and the option `--set`
allowed.py  the code and secrets of its host that a worker lets its run use
join.py     enrolment: Hello, the run's config, the model's folder
link.py     `Link`: the connection, kept alive by a thread of its own
work_loop.py  the loop that rollouts and scorers have in common
permits.py    the requests that one scorer may make to its target's endpoint; pure
allowance.py  their division among all scorers; pure
open_tasks.py  handing open tasks back, and reports of the rows that are left
numbers.py  numbers of a worker for Prometheus
"""
