"""The interface of every engine, and what engines of rows share.

base.py      the interface between a worker's loop and an engine
row_jobs.py  jobs whose rows are worked on one by one, on an asyncio loop beside the worker's
"""
