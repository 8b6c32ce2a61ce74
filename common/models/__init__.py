"""Models as their folders have them, before and while they are loaded.

config_file.py  what its config.json says
headers.py      names, types and shapes of a folder's weights, from the headers of its files
loading.py      the one way to load a model, or to check that it can be loaded
"""
