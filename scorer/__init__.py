"""The scorer worker: the frozen target continues prefixes, and the answers are judged.

Started as `prefixrl-scorer --connect tcp://host:port`, anywhere, any number of times; it may be
killed at any time. It never receives weights. Answers are verified in child processes while the
engine goes on decoding. In direct mode there is no target: a scorer decodes the adapter's answers
and verifies them.

__main__.py  the command
start.py     loading what a scorer needs, after the broker's Welcome
judging.py   open tasks, their verdicts and Scores, and the loop that both kinds of scorer share
loop.py      the scorer with a target
asked_row.py a row as the target is asked: its prompt, the beginning of its answer, the watch for its end
leak.py      whether the gold answer stands in a prefix
direct.py    the scorer without a target
trial.py     the judge of a scorer alone, for answers that are given to it
cache.py     greedy completions kept in memory
verifier/    whether an answer is the gold answer, in processes that can be killed
process/     scores of an answer's steps, with a process reward model
sandbox/     answers that are programs
served/      a target behind a completions endpoint
"""
