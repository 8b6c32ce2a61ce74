"""The comparison of an answer with the gold answer: texts in, a verdict out.

verify.py      the steps of the comparison; a new rule is called from here
looks.py       removes what only changes the looks of an answer
words.py       answers that are words, choices, dates; the words beside a value
boxes.py       several boxes in one sentence as one list, where the gold answer is a list
equations.py   the sides of an equation
guards.py      answers that math-verify accepts wrongly, found from the text alone
reader.py      the base of readers of LaTeX arithmetic
rationals.py   exact values of plain LaTeX arithmetic
residues.py    equality of algebraic expressions without sympy
symbols.py     math-verify's own reading and comparison; may cost seconds
time_limit.py  a limit on the wall time of Python code that no `except` can lift
"""
