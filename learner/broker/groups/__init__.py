"""The state of every group, and the rules for its next step. No sockets.

ledger.py       state and next steps of every group
states.py       its plain values
journaled.py    the part of the ledger that the journal rebuilds
window.py       admission, deadline and choice: the age of samples; pure
admission.py    how much of what the window allows is begun: just in time; pure
filtering.py    the prompt filter, and the shares of groups that end a run; pure
outcomes.py     counts of right and wrong rows by problem, and which problems are asked; pure
ceiling.py      the end of a run by cost; pure
answers.py      greedy answers of the target, kept by their request; pure
drafts.py       answers that the adapter reads: which to ask for, which groups they let begin; pure
evaluations.py  groups of evaluations, pinned to one version, apart from the ledger
"""
