"""The vLLM engine.

checksum.py  checksums of vLLM's parameters that follow from a snapshot
engine.py    the throughput engine
facts.py     the settings that vLLM derives from its arguments, and its count of rows
plugin.py    the plugin in vLLM's own processes
setup.py     arguments and environment of vLLM from a run's config, or a clear error
"""
