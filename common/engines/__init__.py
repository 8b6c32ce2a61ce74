"""Engines: models that continue rows of tokens, for rollouts and scorers.

make.py       the choice of an engine
interface/    what every engine offers to a worker's loop
embedded/     engines by transformers, in the worker's own process
vllm/         the vLLM engine
simulated.py  an engine without a model
"""
