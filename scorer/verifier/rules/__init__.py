"""The rules that say whether an answer is the gold answer.

boxes.py       several boxes in one sentence as one list, where the gold answer is a list
equations.py   sides of an equation
guards.py      answers that math-verify accepts wrongly, found from the text alone
looks.py       removal of all that only changes the looks of an answer
rationals.py   exact values of plain LaTeX arithmetic
reader.py      the base of recursive-descent readers of LaTeX arithmetic
residues.py    equality of algebraic expressions without sympy
symbols.py     readings of a text by math-verify's parser, and their equality; may cost seconds
time_limit.py  a limit on the wall time of Python code that no `except` can lift, for the main thread
verify.py      comparison of an answer with the gold answer
words.py       answers that are words, choices, dates, and the words beside a value
"""
