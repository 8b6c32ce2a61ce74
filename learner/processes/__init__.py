"""The processes that a learner starts.

ranks.py    the rank of this process, and the supervisor of several ranks on one machine
servers.py  broker and weight server: started, watched, restarted
"""
