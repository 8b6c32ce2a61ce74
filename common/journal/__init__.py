"""The journal of a run, and the history that it proves.

crash_points.py  crash points
history.py       the history of a run, checked from its journal alone
journal.py       the journal
records.py       records of the journal
segments.py      the segments of a journal
"""
