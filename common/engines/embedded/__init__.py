"""The embedded engines: a model of transformers in the worker's own process.

`load.py`        the choice of one of the two
`continuous.py`  the default: rows join and leave the forward between two tokens
`fixed_rows.py`  with `bitwise`: a job's rows are one forward from its first token to its last
`held_model.py`  what both share: weights, and the logprobs of given texts
`prefill.py`     the first forward of rows, which computes once what they share
`row_cache.py`   keys and values of rows of different lengths, in one block per layer
`drawing.py`     the draw of a token
`cached_attention.py`  attention of one new token per row, on a CPU
"""
