"""Every type that crosses a socket: a tagged union per direction.

fields.py   limits and base classes of all messages
groups.py   prompts, sampled rows and their verdicts, which workers, ledger, journal and learner share
weights.py  published versions, proofs that an engine holds one, and the exchange with the weight server
worker.py   the exchange of a worker and the broker
learner.py  the exchange of learner ranks, or operators, and the broker
protocol.py the number of the wire format, a digest of all of these

Token ids travel as little-endian int32 bytes, logprobs as little-endian float32 bytes (`packing.py` writes, reads and
checks them).
"""
