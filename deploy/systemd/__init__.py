"""A run as services of systemd.

install.py  `prefixrl systemd`: units for the daemons of one run on this machine
"""
