"""Contents of a run directory, written by the learner and read by commands; signs of life.

directory_format.py   the format of the directory, checked before anything in it is read
json_lines.py         files of JSON lines
disk.py               a full disk: recognised, told, waited for
status.py             the status document
columns.py            a line of metrics as flat columns; pure
alarm_spans.py        alarms of a run as spans of iterations; pure
documents.py          metrics, advantages, summary, end
prometheus.py         numbers of a process for Prometheus, and their endpoint
starts.py             when and with which software the learner started
digests.py  digests of what a worker loaded
"""
