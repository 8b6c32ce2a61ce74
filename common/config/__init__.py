"""The run file: its sections and keys with a sentence each, and reading and checking it.

section.py          the base of every section, types of bounded numbers, refusals of keys
run.py              `RunConfig`, the whole run, with its small sections and the checks across sections
prompting.py        `[adapter]` and `[target]`: the models, and how they are asked
data.py             `[data]`: the problems of a run, and the published problem sets
objectives.py       one record for each objective, built-in or of a package: its facts and the keys that act on it
algorithm.py        `[algorithm]` and `[filter]`: the objective, and which groups are trained
implicit_reward.py  `[implicit_reward]`: rewards of tokens by a model that learns the outcomes
workers/            `[rollout]`, `[scorer]`, `[launch]`, `[simulated]` and `[slurm]`: engines, sampling, GPUs, jobs
learner.py          `[learner]` and `[log]`: optimisers, precision, memory, deadlines; trackers
catalogue.py        all keys with their values, defaults and sentences; names of the same settings elsewhere
load.py             reading a run file, settings over it, explained errors, absolute paths
foreign/            work of others: files, functions of the user's own, packages that add members
tables/             published problem sets, names of settings elsewhere
"""
