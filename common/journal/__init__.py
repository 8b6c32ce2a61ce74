"""The journal of a run: what survives a crash, and the history that it proves.

journal.py       the journal: append, sync, read again
records.py       the records in it
batches.py       the groups of every iteration, from its records; pure
history.py       the history of a run, checked from its records; pure
crash_points.py  places at which a test kills the process
"""
