"""Models behind DeepSpeed: tensors in, logprobs and values out.

model.py          actor, critic, reference and reward model
trained_model.py  one model behind DeepSpeed, and its learning rate
backbone.py       one run of a model: shared prompts, packed rows
attention.py      shared prompts or rows alone, and the implementation of attention; pure
varlen.py         attention over packed rows by torch's own kernel
head.py           logprobs and entropies from hidden states, in blocks of the vocabulary
batch.py          a batch as samples, samples as padded tensors; pure
lora.py           low-rank adaptation
optimizers.py     AdamW as it is fastest where its moments lie
distributed.py    the process group and its collectives
"""
