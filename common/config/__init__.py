"""The run file: its sections and keys with a sentence each, and reading and checking it.

section.py          the base of every section, types of bounded numbers, the check of keys without effect
run.py              `RunConfig`, the whole run, with its small sections and the checks across sections
prompting.py        `[adapter]` and `[target]`: the models, and how they are asked
data.py             `[data]`: the problems of a run, and where they are
problem_sets.py     the published problem sets that `[data]` may name
algorithm.py        `[algorithm]`: the objective and its options
reward_model.py     `[implicit_reward]`: a reward model that is trained beside the adapter
step_rewards.py     `[scorer.prm]`: a process reward model that scores steps
filter.py           `[filter]`: which groups are trained
worker_sections.py  `[rollout]`, `[scorer]` and `[simulated]`: engines and sampling
vllm_options.py     `[rollout.vllm]` and `[scorer.vllm]`
openai_options.py   `[scorer.openai]`
learner.py          `[learner]`: optimisers, precision, memory and deadlines
log.py              `[log]`: TensorBoard and Weights & Biases
processes.py        `[launch]`: processes of one machine, and their GPUs
slurm.py            `[slurm]`: resources of the jobs of a run
catalogue.py        all keys with their values, defaults and sentences; names of the same settings elsewhere
load.py             reading a run file, settings over it, explained errors, absolute paths
user_function.py    functions of the user's own, named `file.py:name`
"""
