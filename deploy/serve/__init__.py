"""`prefixrl serve`: the adapter of a run and its target behind OpenAI's HTTP interface.

    client ── HTTP ──▶ listening.py ──▶ app.py ── problems ──▶ answering.py ── pieces ──▶ engine_thread.py ──▶ engines
                                          ▲ openai_format.py                    └─ streamed_text.py

serve_command.py   its options
start.py           loads the models of a run, listens, ends in order
listening.py       the socket, the key, and time limits of connections
app.py             routes, admission, deadlines, clients that have gone
api_request.py     the JSON of requests, and the errors that refuse them; pure
openai_format.py   the JSON of answers; pure
answering.py       an answer: the adapter's prefix, then the target's completion
engine_thread.py   an engine in a thread, which rows of many clients share
streamed_text.py   the text of an answer while it grows, up to a stop; pure
"""
