"""The messages between processes, and the sockets that carry them.

No other folder imports zmq; no message is pickled.

messages/         every message, one tagged union per link and direction
packing.py        packed token ids and logprobs, and the checks of received groups
verdicts.py       the verdict on a row from those on its continuations; one score from those of steps
keys.py           the keys of a run: who may connect, in which role
flood.py          a bound on unread messages, for each peer and in all
transport.py      `Server` (ROUTER) and `Client` (DEALER), with one table of socket options
address.py        the place where a run's broker listens
interfaces.py     the network interfaces of this host
requester.py      requests to the broker that wait for their answer, for learner ranks and operators
"""
