"""`prefixrl serve`: the adapter of a run and its target behind OpenAI's HTTP interface.

    client ── HTTP ──▶ app.py ── problems ──▶ answering.py ── pieces ──▶ engine_thread.py ──▶ engines

serve_command.py   the options of the command
server.py          loads the models of a run and serves them
listening.py       key, Host, socket and limits of every HTTP server, that of the dashboard too
app.py             routes, admission, deadlines, clients that have gone
api_request.py     the JSON of requests, and the errors that refuse them; pure
openai_format.py   the JSON of answers; pure
answering.py       an answer: the adapter's prefix, then the target's completion, as text that grows
choosing.py        the best of several answers: by votes, or by the process reward model
engine_thread.py   an engine in a thread, which rows of many clients share
"""
