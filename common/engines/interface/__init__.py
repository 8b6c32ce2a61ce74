"""The interface of every engine, and the jobs of engines that write rows elsewhere.

base.py      jobs, continuations, `Engine`, `AdapterEngine`
row_jobs.py  jobs whose rows are written one by one elsewhere: by vLLM, or by an endpoint
adapter.py   the least that an engine of a rollout must hold
"""
