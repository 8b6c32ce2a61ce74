"""The broker: the one process that holds a run's state, a child of learner rank 0.

Rollouts, scorers, learner ranks and operators all talk to its one socket. It decides what is sampled, scored and trained next,
and writes down what must survive a crash before it tells anyone.

Read in this order: `ledger.py` (what became of every group), `window.py` (how old work may be) and `filtering.py` (what is
worth training), all pure, over the plain values of `groups.py`; `dispatch.py`, `workers.py` and `evaluations.py` (who gets
which task), which get time passed in; then the shell: `server.py` (socket and clock); `batches.py` is what learner ranks get.
`prompts.py`, `identity.py` and `status.py` are what the server asks on the way.
"""
