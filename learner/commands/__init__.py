"""The processes behind `prefixrl eval`, `generate`, `warm-start`, `replay`, `try-reward` and `doctor`.

plan_runner.py       reads the plan, starts a broker that trains nothing, carries the plan out
eval_command.py      judges adapters on problems
generate_command.py  answers problems
warm_start.py        trains an adapter on beginnings of right answers
replay.py            trains on the batches of a journal: `replay_loop.py`, the loop; `journal_client.py`, the batches
try_reward.py        calls a reward on answers before any training
doctor.py            what a run needs of its host
"""
