"""Published versions on the learner's side.

`publish.py`  rank 0's thread that writes snapshots and deltas and announces them to the broker
`copies.py`   the copy of a version in the host's memory, and whether it is finite
`probe.py`    the text of the probe
`server.py`   the process that serves them to rollouts
"""
