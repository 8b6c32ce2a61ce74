"""Published weights as bytes: written by the learner, fetched by rollouts.

`folders.py`   the folders of versions and deltas
`memory.py`    memory that other processes map by a path
`snapshot.py`  manifests, checksums, a version on disk and in memory
`delta.py`     the lossless difference of two snapshots
"""
