"""The view of a run while it goes on.

run_state.py  does the run go on, how did it end; its broker's status document
live_view.py  the live view, and lines where there is no terminal
console.py    the status document as a line, a table of workers and details; a new column of `status` begins here
dashboard.py  `prefixrl dashboard`: all runs of a folder in a browser
feed.py       what a run's viewers are told, read once for all of them
bottleneck.py the busiest part of a run, in a line of `status`
stalls.py     the watchdog: names the process that holds a run up
"""
