"""The operator's side: starts, watches and reports runs. It trains nothing and holds no state of a run.

`prefixrl launch` starts all processes of a run on one machine; `status`, `inspect` and `report` read what a run says and left
behind. `examples/` holds complete small runs.

Read in this order: `__main__.py` (the commands), then the file named like the command.
"""
