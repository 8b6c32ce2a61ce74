"""The start of every worker, and its connection to the broker.

command.py  the command line of a worker, and the option `--set`
allowed.py  the code and secrets of its host that a worker lets its run use
join.py     enrolment: Hello, the run's config, the model's folder
link.py     `Link`: the connection, kept alive by a thread of its own
vitals.py   numbers of a worker for Prometheus
rows_left.py  the rows of open tasks that have not ended
drain.py    the orderly end of a worker that is asked to stop
"""
