"""Processes that the learner starts: ranks, broker, weight server.

ranks.py    the rank of this process, and the supervisor of several behind `--nproc-per-node`
servers.py  broker and weight server
"""
