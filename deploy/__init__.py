"""The operator's commands: they start, watch and report runs, and hold no state of a run.

__main__.py  the command `prefixrl`, its subcommands and their options
commands/    one file per small subcommand
launch/      `prefixrl launch` and `resume`: all processes of a run on one machine
view/        how a run is shown while it goes on: `status`, `list`, the watchdog
runs/        a run's files after the fact: report, samples, inspect, export, checkpoints
track/       `prefixrl track`: metrics in TensorBoard, Weights & Biases and others
serve/       `prefixrl serve`: the adapter and its target behind OpenAI's HTTP interface
sweep/       `prefixrl sweep`: many runs from one file
slurm/       `prefixrl slurm`, `scale`, `kubernetes`: a run as jobs of a cluster
container    images for Docker and Apptainer
examples/    complete small runs
python/      `import prefixrl`: installed as the module of the whole package
docs         the pages of `prefixrl docs`, a link to those of the repository
"""
