"""The problems of a run, from data files to the order in which they are asked.

problems.py     reads, checks and keeps the problems of a run; called by the rest of the learner
files.py        rows of data files in any format
columns.py      the columns of a row to text
rows.py         a row to a problem
doubts.py       what looks wrong in a source that can be read
lengths.py      questions that are too long for a prompt
order.py        the order of prompts, and mixtures of sources
gold_check.py   gold answers that do not verify against themselves
"""
