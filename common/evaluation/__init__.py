"""Plans of evaluations, and the figures of judged answers.

plans.py      plans, results and answers of `prefixrl eval` and `prefixrl generate`
accuracy.py   judged rows and the figures of one arm
paired.py     the difference of two arms on the same problems, with its interval; pure
best_of_n.py  one of several answers, chosen by the scores of their steps; pure
"""
