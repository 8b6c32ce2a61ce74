"""A warm start: an adapter learns to begin answers as right answers begin, before it is trained by reward.

    answers to training problems ──▶ examples ──▶ epochs of cross entropy ──held-out loss──▶ the best epoch

`examples.py`   prompts and prefixes: just what a rollout of the run could have written
`fitting.py`    the epochs: losses, checkpoints, the early stop
"""
