"""A process reward model: a score for every step of an answer, beside the verdict.

steps.py        steps of a text, where they end in its tokens, the reward from their score; pure
formats.py      the text that the model reads, with its tags, and the checks of tag and candidates at the start
torch_model.py  the model in transformers
vllm_model.py   the model in vLLM
step_scoring.py rewards of a group's texts, by the engine that its record names
"""
