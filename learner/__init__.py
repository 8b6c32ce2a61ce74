"""The learner: the process that trains, and the parent of all that holds a run's state.

Started as `prefixrl-learner run.toml`, on several GPUs once per rank. Rank 0 starts the broker and the weight server
before DeepSpeed loads. Every rank then asks the broker for a batch, plans it, fetches its shard, turns verdicts into
advantages and these into PPO steps; rank 0 publishes the new version. After a restart it resumes from its last
checkpoint and trains the batches again that the broker's journal recorded after it.

Read in this order:

    loop.py         one iteration as a list of verbs
    training/       PPO on one batch: `objectives.py` is where the algorithms differ
    broker/         state of the run: what may be sampled, scored and trained, by whom; and the way of one group
    weights/        publishing versions, and serving them to rollouts
    evaluation/     judging adapters: in training, `prefixrl eval`, `prefixrl generate`
    data/           from data files to problems, and their order
    run/            the run directory, metrics, summary, and the forecast of `--check`
    start.py        starting one rank, in the right order
    __main__.py     the command
check/      `--check`: what a config will need, before it is spent
commands/   the learner's side of `prefixrl eval` and `prefixrl generate`
models/     models behind DeepSpeed
processes/  processes that the learner starts
"""
