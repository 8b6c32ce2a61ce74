"""`prefixrl launch` and `prefixrl resume`: the processes of a run on one machine.

child_process.py  one child process of a launch
fork_client.py    the template of a launch, and the workers forked from it, as the launch sees them
fork_server.py    the process that a launch forks its workers from, so that torch is imported once for all
launch.py         everything on one machine
resume.py         `prefixrl resume`: a run goes on as its directory has it; changes are recorded
"""
