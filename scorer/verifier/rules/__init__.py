"""The comparison of an answer with the gold answer: texts in, a verdict out.

verify.py      the verdict on an answer: by the rules, else by math-verify
exact.py       the rules that need no sympy, one ordered list; a new rule is an entry of it
looks.py       removes what only changes the looks of an answer
question.py    the answer beside the question, whose formulas are no answers
words.py       answers that are words, choices, dates
units.py       the words behind a value
units.txt      units and counted things, singular; then words that are never a unit
boxes.py       several boxes in one sentence as one list, where the gold answer is a list
equations.py   the sides of an equation
relations.py   inequalities as sets
guards.py      answers that math-verify accepts wrongly, found from the text alone
arithmetic.py  exact values of LaTeX arithmetic, and equality of expressions modulo a prime
symbols.py     math-verify's own reading and comparison; may cost seconds
"""
