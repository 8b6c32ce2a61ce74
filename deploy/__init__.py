"""The operator's commands: they start, watch and report runs, and hold no state of a run.

__main__.py      the commands and their options
rhythm.py        when a line is due
capacity/        the model of a running system that it predicts with
python/          `import prefixrl`: installed as the module of the whole package
curves.py        the curves of the page
show.py          `prefixrl show`
serve/           `prefixrl serve`: the adapter and its target behind OpenAI's HTTP interface
systemd/         templates of its units
docs             the pages of `prefixrl docs`, a link to those of the repository
slurm/           `prefixrl slurm`, `prefixrl scale`: a run as jobs of SLURM
sweep/           `prefixrl sweep`: many runs from one file
commands/  the commands of `prefixrl`, one file each
launch/    `prefixrl launch` and `prefixrl resume`: the processes of a run on one machine
runs/      finished and running runs
view/      how a run is shown while it goes on
"""
