"""A run as services of systemd.

install.py  `prefixrl systemd`: units for the daemons of one run on this machine
templates   the form of the units, of their environment file, and of the next commands
"""
