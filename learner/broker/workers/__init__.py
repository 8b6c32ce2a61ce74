"""Workers: who is connected, what each holds, who gets the next task. No sockets.

registry.py    the connected workers, their names, and which are lost: silent, stalled or dead
workers.py     their leases and free rows
task_order.py  the order in which they get tasks
dispatch.py    tasks for workers; the effect of results and losses
task_names.py  names that prove which worker held which task
stage_clock.py waiting times of groups between their stages; pure
identity.py    the check of models, tokenizers and published digests
versions.py    the weights that each worker holds, proved or not; the other half is `rollout/swap.py`
proofs.py      whether logprobs and checksums show that an engine holds a version; pure
"""
