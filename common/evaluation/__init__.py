"""Judged rows and their figures: of one arm, of two arms, of several answers.

accuracy.py   figures of judged answers
best_of_n.py  test-time search
paired.py     the difference of two arms on the same problems, its interval, its chance
plans.py      plans of `prefixrl eval` and `generate` for the process that works for them, its results
"""
