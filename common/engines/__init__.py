"""Engines: models that continue rows of tokens, for rollouts and scorers.

`pieces.py`       the text that each token adds to an answer
`handover.py`     a prefix on its way from the adapter's tokenizer to the target's
`make.py`         the choice of an engine
`embedded/`       the embedded engines, by transformers
`simulated.py`    an engine without a model
                  `vllm_plugin.py`: its part in vLLM's processes; `vllm_checksum.py`: checksums of its parameters
interface/  the interface of every engine, and what engines of rows share
vllm/       the vLLM engine
"""
