"""Files of a run directory that several processes read or write.

directory_format.py  the format of the directory, checked before anything in it is read; the starts of the learner
changes.py           settings that differ between two starts, and those that may
documents.py         metrics, advantages, summary, end; metrics as flat columns, alarms as spans
status.py            the status document
json_lines.py        files of JSON lines
digests.py           digests of what a worker loaded
disk.py              the wait for room on a full disk
tracker.py           what a tracker is: a record, by which packages add others; samples of a run
warm_start.py        plan and report of a warm start; what a run that begins with one shares with it
replay.py            the plan of a replay: which settings it may have; what tells it from a run
prometheus.py        numbers of a process for Prometheus, and their endpoint
"""
