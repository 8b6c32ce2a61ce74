"""Questions as a model is asked them, and answers as they are read.

rendering.py      questions to token ids and back; stops, control tokens, prefixes for another tokenizer
limits.py         limits of a question, before a tokenizer is loaded
prompt_form.py    the text of a prompt: chat template, prompt template, the token that closes a turn
tokenizer.py      a model's tokenizer, as its files have it
extract.py        the part of a completion that is the answer
answer_end.py     the place where that part is complete, while a completion is written
program_tests.py  the tests in the gold answer of a coding task
asking.py         lines that show how both models are asked, and warnings about it
"""
