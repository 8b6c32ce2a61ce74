"""Published weights as bytes: written by the learner, fetched by rollouts.

`folders.py`   the folders of versions and deltas
`low_rank.py`  the matrices of a LoRA run in place of whole weights
`memory.py`    memory that other processes map by a path
`snapshot.py`  manifests, checksums, a version on disk and in memory
`delta.py`     the lossless difference of two snapshots
"""
