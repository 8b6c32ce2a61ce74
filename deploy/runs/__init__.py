"""Finished and running runs: their checkpoints, tables, reports and exports.

checkpoints.py  runs and their checkpoints as commands name them
eval_table.py   the table of `prefixrl eval`: lines per set, arm and decoding, and over several runs
export.py       `prefixrl export`: the metrics of a run as one table, a row per iteration
inspect.py      `prefixrl inspect`: a line per trained group of a run, losses by cause, a checked history
report.py       the result of a run
report_page.py  `report.html`: one page without scripts or anything from outside; all text is escaped
samples.py      `prefixrl samples`: the texts of a run
track.py        `prefixrl track`: the metrics and samples of a run in TensorBoard and Weights & Biases
"""
