"""Contents of a run directory, written by the learner and read by commands; signs of life.

directory_format.py   the format of the directory, checked before anything in it is read
records.py            the records of the journal
journal.py            the journal; `segments.py`: one of its files
json_lines.py         files of JSON lines
crash_points.py       places at which a test has a process killed
history.py            the history of a run, checked from its journal; pure
disk.py               a full disk: recognised, told, waited for
status.py             the status document
columns.py            a line of metrics as flat columns; pure
alarm_spans.py        alarms of a run as spans of iterations; pure
documents.py          metrics, advantages, summary, end
accuracy.py           judged rows and the figures of an arm
best_of_n.py          one of several answers, chosen by scores of their steps; pure
paired.py             the difference of two arms on the same problems
service.py            what systemd is told about a daemon
placement.py          GPUs of one machine, and which process runs on which
memory_use.py         the memory of a process
prometheus.py         numbers of a process for Prometheus, and their endpoint
starts.py             when and with which software the learner started
plans.py              plans, results and answers of `prefixrl eval` and `generate`
"""
