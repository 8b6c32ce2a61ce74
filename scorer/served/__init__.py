"""A target behind an OpenAI-compatible completions endpoint.

engine.py       `OpenAIEngine`: jobs as requests, one per row
endpoint.py     `CompletionsEndpoint`: retries, rate limits, patience, counts
http_client.py  one request: key, proxies, time limit, faults on the way
protocol.py     the JSON of requests, and the outcomes of answers
"""
