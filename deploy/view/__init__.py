"""The view of a run while it goes on.

run_state.py  is the run going on, over or stopped: `prefixrl list` and `prefixrl compare`
live_view.py  the broker's status document, and the live view
console.py    the document as a picture and as a line; when a line is due
stalls.py     the watchdog: names who holds a run up
"""
