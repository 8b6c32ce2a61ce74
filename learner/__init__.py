"""The learner: the process that trains, and the parent of everything that holds a run's state.

Started as `prefixrl-learner run.toml`, on several GPUs once per rank. Rank 0 spawns the broker (`broker/`) and the weight
server before DeepSpeed loads; every rank then asks the broker for its shard of a batch like any other client, turns verdicts
into advantages and those into PPO steps, and rank 0 publishes the new version. Restarted by its supervisor it resumes from its
last checkpoint and trains the batches again that the broker's journal recorded after it.

Read in this order: `loop.py` (one turn as a list of verbs), `iteration.py` (PPO on one batch), the pure files `batch.py`,
`advantages.py`, `ppo.py`, `plan.py`, then `model.py` and `trainee.py` (the only one that knows DeepSpeed's engine),
`publish.py`, `checkpoint.py`, `evaluate.py`; `problems.py` and `data/` (what is asked); `start.py` and `servers.py` bring it
all up.
"""
