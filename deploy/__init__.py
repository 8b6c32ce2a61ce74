"""The operator's commands: they start, watch and report runs, and hold no state of a run.

__main__.py      the commands and their options
launch.py        `prefixrl launch`, and the children of every command that starts workers
resume.py        `prefixrl resume`
child.py         one child of a launch and its log
template.py      the process that its workers are forked from
template_process.py  that process, as the launch sees it
watchdog.py      who holds a run up when nothing happens
starting.py      the commands for who begins
recipe.py        `prefixrl init`
pages.py         `prefixrl docs` and `prefixrl completion`
watching.py      the commands for runs that were started
standing.py      `prefixrl status`: how a run goes on, or how it ended
status.py        the broker's document in words, and the live view
console.py       the picture and the line of both
rhythm.py        when a line is due
logs.py          `prefixrl logs`
fleet.py         `prefixrl stop` and `prefixrl workers`
advice.py        `prefixrl advise`
capacity/        the model of a running system that it predicts with
inspect.py       `prefixrl inspect`
samples.py       `prefixrl samples`
handle.py        a run from Python
python/          `import prefixrl`: installed as the module of the whole package
report.py        `prefixrl report`
page.py          its page
curves.py        the curves of the page
settings.py      `prefixrl config`
runs.py          `prefixrl list` and `prefixrl compare`
export.py        `prefixrl export`
track.py         `prefixrl track`
keygen.py        `prefixrl keygen` and `prefixrl worker-command`
show.py          `prefixrl show`
checkpoints.py   runs and their checkpoints, as commands name them
evaluate.py      `prefixrl eval`
results.py       the table of `prefixrl eval`
generate.py      `prefixrl generate`
serve/           `prefixrl serve`: the adapter and its target behind OpenAI's HTTP interface
units.py         `prefixrl systemd`
systemd/         templates of its units
examples/        complete small runs
docs             the pages of `prefixrl docs`, a link to those of the repository
slurm/           `prefixrl slurm`, `prefixrl scale`: a run as jobs of SLURM
sweep/           `prefixrl sweep`: many runs from one file
"""
