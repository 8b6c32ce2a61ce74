"""Evaluations: problems that the broker's workers answer, and the verdicts on the answers.

Training asks for them between its iterations; `prefixrl eval` and `prefixrl generate` start a process that asks.

    requests.py    sends requests to the broker, gathers answers, keeps judged rows in files
    arms.py        the arms that every run reports, and the choice of the fixed prefix
    majority.py    votes: which answers to a problem are equal
    clustering.py  prefix clustering, an arm of `prefixrl eval`
"""
