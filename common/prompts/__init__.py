"""Questions as a model is asked them, and answers as they are read.

asking.py       lines that show how models are asked and where texts end; warnings about it
extract.py      the part of a completion that is the answer
prompt_form.py  the text of a prompt from a question, and the token that closes an assistant's turn
rendering.py    questions to token ids and back by a model's tokenizer; its stops and control tokens
tokenizer.py    the tokenizer of a model folder, as the folder's files have it
"""
