"""How a run is shown while it goes on.

console.py    the state of a run as a picture for a terminal, and as one line for a file
live_view.py  the state of a run, from its broker
run_state.py  `prefixrl list`, `prefixrl compare`: runs side by side, from their files alone
stalls.py     the watchdog of a launch names who holds the run up when nothing happens
"""
