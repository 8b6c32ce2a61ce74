"""Servers that are asked over HTTP: a target behind OpenAI's completions interface, rewards of the user's own.

load.py         the engine of a served target, by the interface of its endpoint
engine.py       `OpenAIEngine`: jobs as requests, one per row
chat_engine.py  `ChatEngine`: the same in messages
rewards.py      `RewardServer`: rewards in place of the verifier, in batches
endpoint.py     `Endpoint`: retries, rate limits, patience, counts
pacing.py       the turns of requests, where a run limits them
http_client.py  one request: key, proxies, time limit, faults on the way
protocol.py     the JSON of requests, and the outcomes of answers
chat.py         the same for `/chat/completions`
"""
