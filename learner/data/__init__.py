"""From data files to problems; `learner/problems.py` puts the parts together and is what the rest of the learner calls.

`files.py`: rows of files in any format. `rows.py`: a row to a problem, pure. `lengths.py`: questions no prompt has room for.
"""
