"""The broker: the one process that holds a run's state, a child of learner rank 0.

Rollouts, scorers, learner ranks and operators all talk to its one socket. It decides what is sampled, scored and
trained next, and writes to its journal what must survive a crash before it acknowledges anything.

    server.py    socket, clock, enrolment, the handlers of every message; `__main__.py` starts it
    groups/      the state of every group: `ledger.py`; the age of samples: `window.py`; the prompt filter
    workers/     who is connected, what each holds, who gets the next task: `dispatch.py`
    outbox.py    the messages that rest on the journal, and their order
    batches.py   answers to ranks that ask for a batch, and the reasons why none is ready
    peers.py     the ranks and operators that are known, and what they may do
    status.py    the status document, and the usage of a served target
    client.py    the ranks' connection to the broker

The way of one group through these files is in docs/window.md.
"""
