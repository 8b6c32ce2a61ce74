"""The verifier: whether an answer is the gold answer.

routing.py        the way of a completion: a verdict at once, or a question to a child
pool.py           `VerifierPool`: verdicts without waiting, from children that can be killed
pool_thread.py    `PoolThread`: the pool of a scorer, which an engine's steps do not hold up
child_process.py  a child as the pool sees it, and the template from which it is forked
exchange.py       the messages between pool and children
child.py          the child itself
verifiers.py      the judges in a child: sympy, and the table of verifiers that rows name by `code`
scoring.py        a user's function in a child, with its arguments
rewards.py        rewards as functions, verifiers and servers give them
time_limit.py     a limit on the wall time of Python code that no `except` can lift
complaints.py     failures by kind, for a log that names each once
offline.py        a process for a learner: which answers are equal, which gold answers do not verify
rules/            the comparison itself: texts in, a verdict out
"""
