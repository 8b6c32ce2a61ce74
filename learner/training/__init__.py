"""PPO on one batch of scored groups: rows come in, steps and figures go out; no sockets.

Read in this order:

    iteration.py      one iteration: measure, advantages, mini-batches, steps
    objectives.py     the table of algorithms: which arguments of the pure functions `grpo`, `rloo`, `gae` … stand for
    advantages.py     rewards per token, GAE, group baselines, whitening; pure
    implicit_reward.py  rewards of tokens by an implicit reward model, its loss and baselines; pure
    process_rewards.py  the same for an iteration: scores, and steps of the reward model
    ppo.py            policy and value loss, KL estimates; pure
    ratios.py         ratios of the three policies, masks and bounds on them; pure
    drift.py          distance of the engine's policy from the learner's, by age; pure
    batch.py          a batch as samples, samples as padded tensors; pure
    plan.py           the rows of each mini-batch, rank, micro-batch and line; pure
    figures.py        the figures of an iteration, summed over ranks
    model.py          actor, critic, reference and reward model
    attention.py      shared prompts or rows alone, and the implementation of attention; pure
    varlen.py         attention over packed rows by torch's own kernel
    backbone.py       one run of a model: shared prompts, packed rows
    head.py           logprobs and entropies from hidden states, in blocks of the vocabulary
    trained_model.py  one model behind DeepSpeed, and its learning rate
    optimizers.py     AdamW as it is fastest where its moments lie
    lora.py           low-rank adaptation
    distributed.py    the process group and its collectives
    checkpoint.py     saving and resuming; `manifest.py`: its state and digests
"""
