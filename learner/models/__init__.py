"""Models behind DeepSpeed: forward passes, heads, optimisers.

attention.py      the attention that a config asks for
backbone.py       one run of a model's backbone over a micro-batch
batch.py          from batches to samples, and from samples to padded tensors
distributed.py    deepSpeed's process group, with or without a launcher, and the learner's own collectives
head.py           logprobs and entropies from hidden states, without a table of tokens x vocabulary
lora.py           loRA (Hu et al
model.py          actor, critic and reference behind a few methods; `iteration.py` brings losses and order
optimizers.py     adamW by torch, fused on CUDA, or by DeepSpeed for moments in the host's memory
trained_model.py  one trained module behind DeepSpeed, whose engine and optimisers only this file knows
varlen.py         attention over packed rows of several lengths, by torch's own kernel
"""
