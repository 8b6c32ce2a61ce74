"""The files of a run, shown: while it goes on and after its end.

checkpoints.py  runs and checkpoints as commands name them
show.py         `prefixrl show`: the text and tokens that the models see of a question
inspect.py      `prefixrl inspect`: a line per trained group, and the checked history
samples.py      `prefixrl samples`: what the adapter writes
export.py       `prefixrl export`: metrics as a table
report.py       `prefixrl report`: the table of a run, and what its page shows
report_page.py  `report.html`: the page in `page/` with the data inside
curves.py       the numbers of metrics.jsonl as columns, thinned for drawing
tables.py       tables of plain texts
eval_table.py   the table of `prefixrl eval`
"""
