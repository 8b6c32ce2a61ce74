"""The vLLM engine, for throughput on GPUs.

load.py      loading it, and what `prefixrl doctor` says of it
engine.py    the engine itself
setup.py     its arguments and environment, from the run's config
facts.py     the settings that vLLM derives from its arguments
plugin.py    the part that runs in vLLM's own processes: installs weights
checksum.py  checksums of vLLM's parameters, predicted from a snapshot
"""
