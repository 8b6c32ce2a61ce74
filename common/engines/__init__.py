"""Engines: models that continue rows of tokens, for rollouts and scorers.

`base.py`         the interface: jobs, continuations, `Engine`, `AdapterEngine`
`rendering.py`    questions to token ids and back, stops, control tokens
`tokenizer.py`    a model's tokenizer, as its files have it
`prompt_form.py`  the text of a prompt: chat template, prompt template, and the token that closes a turn
`asking.py`       lines that show how both models are asked, and warnings about it
`pieces.py`       the text that each token adds to an answer
`handover.py`     a prefix on its way from the adapter's tokenizer to the target's
`extract.py`      the part of a completion that is the answer
`make.py`         the choice of an engine
`embedded/`       the embedded engines, by transformers
`simulated.py`    an engine without a model
`row_jobs.py`     jobs whose rows are written one by one elsewhere: by vLLM, or by an endpoint
`vllm.py`         the throughput engine; `vllm_setup.py`: its arguments; `vllm_facts.py`: what vLLM makes of them;
                  `vllm_plugin.py`: its part in vLLM's processes; `vllm_checksum.py`: checksums of its parameters
"""
