"""PPO on one batch of scored groups: rows come in, steps and figures go out; no sockets.

Read in this order:

    iteration.py        one iteration: measure, advantages, mini-batches, steps
    objectives.py       the table of algorithms: which arguments of the pure functions `grpo`, `rloo`, `gae` … stand for
    advantages.py       rewards per token, GAE, group baselines, whitening; pure
    ppo.py              ratios of the three policies, losses, KL estimates, drift of the engine by age; pure
    loss_function.py    the loss of a function of the user's own: called, checked, tried beforehand
    plan.py             the rows of each mini-batch, rank, micro-batch and line; pure
    implicit_reward.py  rewards of tokens by an implicit reward model, its loss and baselines; pure
    step_scores.py      scores of steps at the tokens that end them, and their baselines; pure
    process_rewards.py  both for an iteration: scores, and steps of the reward model
    figures.py          the figures of an iteration, summed over ranks
    warm_start/         cross entropy on the beginnings of right answers, before a run
    speed.py            speed and memory of each rank
    checkpoint.py       saving and resuming; the manifest with its state and digests
"""
