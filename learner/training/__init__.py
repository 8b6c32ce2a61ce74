"""PPO on one batch of scored groups: rows come in, steps and figures go out; no sockets.

Read in this order:

    iteration.py      one iteration: measure, advantages, mini-batches, steps
    objectives.py     the table of algorithms: which arguments of the pure functions `grpo`, `rloo`, `gae` … stand for
    advantages.py     rewards per token, GAE, group baselines, whitening; pure
    implicit_reward.py  rewards of tokens by an implicit reward model, its loss and baselines; pure
    step_scores.py    scores of steps at the tokens that end them, and their baselines; pure
    process_rewards.py  both for an iteration: scores, and steps of the reward model
    ppo.py            policy and value loss, KL estimates; pure
    ratios.py         ratios of the three policies, masks and bounds on them; pure
    drift.py          distance of the engine's policy from the learner's, by age; pure
    plan.py           the rows of each mini-batch, rank, micro-batch and line; pure
    figures.py        the figures of an iteration, summed over ranks
    checkpoint.py     saving and resuming; `manifest.py`: its state and digests
"""
