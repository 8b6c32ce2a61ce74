"""The rollout worker: writes prefixes with an adapter engine at one version.

Started as `prefixrl-rollout --connect tcp://host:port`, anywhere, any number of times; it may be killed at any time.
The broker sends it the run's configuration and its tasks, the weight server its weights.

`loop.py`     receive, generate, send; swap weights
`swap.py`     the versions it stages, installs and proves; the other half is `learner/broker/workers/versions.py`
`weights.py`  fetches snapshots in the background; `staging.py`: one snapshot being assembled
`host.py`     one pull for all rollouts of a host
`start.py`    loads engine and renderer; `__main__.py`: the command
"""
