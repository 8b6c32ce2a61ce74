"""The rollout worker: writes prefixes with an adapter engine at one version and owns nothing else.

Started as `prefixrl-rollout --connect tcp://host:port`, anywhere, any number of times; it may be killed at any time. The broker
sends it the run's configuration and its tasks; it pulls weights from the weight server, proves their installation by the
probe, and answers every task with whole groups of prefixes.

Read in this order: `loop.py` (receive, generate, send; swap weights between tasks), `weights.py` (fetches snapshots in the
background), `start.py`; the engines are in `common/`.
"""
