"""Plans of evaluations, and the figures of judged answers.

plans.py      plans, results and answers of `prefixrl eval` and `prefixrl generate`
accuracy.py   judged rows, the figures of one arm, the difference of two; pure
equality.py   equal answers to a problem, compared by the verifier in a process of its own
grouping.py   values by key; pure
trials.py     rewards of given answers, by a scorer's judge in a process of its own
"""
