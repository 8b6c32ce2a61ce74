"""Work of others that a run uses: files, functions and packages. A fault of theirs is a sentence that names it.

files.py          files that others wrote, or that may be damaged
templates.py      texts around a question: their files, their places, the form without advice
user_function.py  functions of the user's own, named `file.py:name`
plugins.py        packages that add a member at a seam, found by their entry points
verifier.py       the record of a verifier, which packages may add
"""
