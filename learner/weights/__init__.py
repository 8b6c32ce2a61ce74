"""Published versions on the learner's side.

`publish.py`  rank 0's thread that writes snapshots and deltas and announces them to the broker
`server.py`   the process that serves them to rollouts
"""
