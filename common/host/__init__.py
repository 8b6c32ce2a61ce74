"""The machine that a process runs on: folders, signals, GPUs, memory, services.

hub.py         folders of models and datasets on this host
memory_use.py  the memory of this process
placement.py   gPUs of one machine, and which process runs on which; all but `gpus_here` is pure
process.py     the conduct of every process of a run
service.py     signs of life for systemd (`Type=notify`): datagrams to its socket, NOTIFY_SOCKET
"""
