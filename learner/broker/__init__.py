"""The broker: the one process that holds a run's state, a child of learner rank 0.

Rollouts, scorers, learner ranks and operators all talk to its one socket. It decides what is sampled, scored and
trained next, and writes to its journal what must survive a crash before it acknowledges anything.

    server.py    socket, clock, enrolment, the handlers of every message; `__main__.py` starts it
    groups/      the state of every group: `ledger.py`; the age of samples: `window.py`; the prompt filter
    workers/     who is connected, what each holds, who gets the next task: `dispatch.py`
    batches.py   answers to ranks that ask for a batch, and the reasons why none is ready
    peers.py     the ranks and operators that are known, and what they may do
    status.py    the status document, and the usage of a served target
    client.py    the ranks' connection to the broker

The way of one group (each wait with what ends it in brackets):

    step    function ◀─ caller                                                   state       waits for
    issue   ledger.start_sampling ◀─ dispatch._give_sampling ◀─ server.serve     sampling    a row (RowsLeft), room in
                                                                                 the window (Published, IterationDone)
    sample  rollout/loop._start ◀─ PrefixTask; engine.submit, engine.step        sampling    engine, a proof (Probed)
    check   versions.check_prefixes, dispatch.take_prefixes ◀─                   sampling    nothing
            server._handle_worker ◀─ Prefixes ◀─ rollout/loop._deliver
    accept  ledger.take_prefixes ◀─ dispatch.take_prefixes                       sampled     nothing
    lease   ledger.start_scoring ◀─ dispatch._give_scoring ◀─ server.serve       scoring     free rows (RowsLeft)
    score   scorer/loop._start ◀─ ScoreTask; then scorer/judging.Judging         scoring     engine, verifier (limit)
    judge   ledger.take_scores ◀─ dispatch.take_scores ◀─ server._handle_worker  scored [1]  nothing
            ◀─ Scores ◀─ scorer/judging
    record  journal.append, then Ack ◀─ server._write_down ◀─ server.serve       scored      the disk
    choose  ledger.batch, window.choose ◀─ batches.answers ◀─ GetBatch           batched     groups due before (Scores)
    fetch   client.next_batch ◀─ learner/loop.next_batch: Batch or NotYet        batched     the broker (deadline)
    train   models/batch.iteration_data, training/iteration.train_iteration    batched     every rank's shard
    finish  ledger.trained ◀─ server._answer_peer ◀─ client.iteration_done       trained     nothing

[1] or filtered, failed, expired: see the picture in `groups/ledger.py`.
A worker that is silent, stalls or leaves unblocks its groups: server._give_up_lost ─▶ dispatch.lose ─▶
ledger.give_back, which queues them again, or ends them and requeues their prompts.
"""
