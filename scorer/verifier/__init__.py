"""The verifier: whether an answer is the gold answer.

verify.py         the exact path, and the slow path through math-verify
looks.py          what only changes the looks of an answer
equations.py      which side of an equation is the answer, and what the others must be
boxes.py          several boxes in one sentence as one list
words.py          words, choices, dates, and units beside a value
guards.py         answers that math-verify accepts wrongly, found from the text
symbols.py        readings of a text by math-verify's parser, and their equality
reader.py         the base of the two readers below
rationals.py      exact values of plain LaTeX arithmetic
residues.py       equality of algebraic expressions modulo a large prime
time_limit.py     a wall-time limit that no `except` can lift
routing.py        the way of a completion: a verdict at once, or a question to a child
pool.py           `VerifierPool`: verdicts without waiting, from children that can be killed
child_process.py  a child as the pool sees it, and the template from which it is forked
exchange.py       the messages between pool and children
child.py          the child itself: sympy and programs
scoring.py        a user's function in a child, and what it is handed
complaints.py     failures by kind, for a log that names each once
equalities.py     a process that tells which answers to a problem are equal
golds.py          a process that reports gold answers that do not verify against themselves
"""
