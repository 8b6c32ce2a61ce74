"""The states of groups: ledger, window, admission, filter. Pure.

admission.py    admission, just in time
evaluations.py  evaluations in progress
filtering.py    the prompt filter, and the shares of passing and failing groups that end a run
journaled.py    the part of the ledger that the journal rebuilds
ledger.py       the ledger
states.py       plain values of a ledger
window.py       the window
"""
