"""The learner: the process that trains, and the parent of all that holds a run's state.

Started as `prefixrl-learner run.toml`, on several GPUs once per rank. Rank 0 starts the broker and the weight server
before DeepSpeed loads. Every rank then asks the broker for a batch, plans it, fetches its shard, turns verdicts into
advantages and these into PPO steps; rank 0 publishes the new version. After a restart it resumes from its last
checkpoint and trains the batches again that the broker's journal recorded after it.

Read in this order:

    loop.py      one iteration as a list of verbs
    training/    PPO on one batch: `objectives.py` is where the algorithms differ
    models/      the models behind DeepSpeed: logprobs, values, optimisers
    broker/      state of the run: what may be sampled, scored and trained, by whom
    weights/     publishing versions, and serving them to rollouts
    data/        from data files to problems, and their order
    evaluation/  judging adapters in training
    commands/    the processes behind `prefixrl eval`, `generate`, `warm-start`, `replay`
    run/         the run directory, metrics, summary
    check/       the forecast of `--check`
    processes/   ranks, broker and weight server: started and watched
    start.py     starting one rank, in the right order
    __main__.py  the command
"""
