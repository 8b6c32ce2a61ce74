"""The comparison of an answer with the gold answer: texts in, a verdict out.

verify.py      the steps of the comparison; a new rule is called from here
looks.py       removes what only changes the looks of an answer
question.py    the answer beside the question, whose formulas are no answers
words.py       answers that are words, choices, dates
units.py       the words behind a value
tables/        patterns by name, those of looks.py; units and counted things, singular, then what is never a unit
boxes.py       several boxes in one sentence as one list, where the gold answer is a list
equations.py   the sides of an equation
relations.py   inequalities as sets
guards.py      answers that math-verify accepts wrongly, found from the text alone
arithmetic.py  exact values of LaTeX arithmetic, and equality of expressions modulo a prime
symbols.py     math-verify's own reading and comparison; may cost seconds
time_limit.py  a limit on the wall time of Python code that no `except` can lift
"""
