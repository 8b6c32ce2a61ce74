"""The scorer worker: lets the frozen target continue prefixes and judges the final answers; owns nothing else.

Started as `prefixrl-scorer --connect tcp://host:port`, anywhere, any number of times; it may be killed at any time. It never
receives weights: with its target loaded it is a pure throughput machine, so answers are verified in child processes while
the engine goes on decoding.

In direct mode there is no target: a scorer decodes the adapter's answers and verifies them.

Read in this order: `loop.py` (receive, continue, judge, send), `direct.py` (the same without a target), `judging.py` (what both
share), `common/extract.py` (which part of a text is the answer), `verify.py` (is it the gold answer), `verifier_pool.py` and
`verifier_child.py` (the same, in processes that can be killed), `programs.py` and `sandbox.py` (answers that are programs).
"""
