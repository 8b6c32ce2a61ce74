"""Evaluations: problems that the broker's workers answer, and the verdicts on the answers.

Training asks for them between its iterations; `prefixrl eval` and `prefixrl generate` start a process that asks.

    requests.py           sends requests to the broker, gathers answers, keeps judged rows in files
    arms.py               the arms that every run reports, and the choice of the fixed prefix
    serving.py            the start of a process that asks, with a broker that trains nothing
    eval_command.py       the process behind `prefixrl eval`
    majority.py           votes: which answers to a problem are equal
    clustering.py         prefix clustering, an arm of `prefixrl eval`
    generate_command.py   the process behind `prefixrl generate`
"""
