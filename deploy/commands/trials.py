"""`prefixrl try-loss` and `try-reward`: functions of the user's own, called before any training."""

import subprocess
import sys
from typing import Any

import click
import msgspec

from prefixrl.common.evaluation.trials import TrialOptions
from prefixrl.common.worker.command import settings_option


@click.command("try-loss")
@click.argument("function")
def try_loss(function: str) -> None:
    """Call FUNCTION, `mine.py:loss`, on made-up rows as `algorithm.loss_function` is called.

    Executes its file. Its gradient is compared with finite differences in float64, and its sum over two micro-batches
    with that over one.
    """
    raise SystemExit(
        subprocess.call([sys.executable, "-m", "prefixrl.learner.training.loss_function", function])
    )


@click.command("try-reward")
@click.argument("reward", metavar="RUN_FILE|FUNCTION")
@settings_option
@click.option(
    "--data",
    type=click.Path(),
    metavar="FILE",
    help="Problems to try it on, in place of the run file's.",
)
@click.option(
    "--run",
    type=click.Path(),
    metavar="RUN",
    help="Try it on answers of this run, too, which has scorer.keep_completions.",
)
@click.option(
    "--problems",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Problems whose gold answers are tried.",
)
@click.option(
    "--form",
    help="How an answer is written, with {gold} in it.  [default: of five usual forms the one that earns most]",
)
@click.option(
    "--least-right",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Least reward of a right answer.",
)
@click.option(
    "--most-wrong",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Largest reward of a wrong answer.",
)
def try_reward(**options: Any) -> None:
    """Call the reward of RUN_FILE, or FUNCTION (`mine.py:score`) with --data, on right, wrong and hostile answers.

    Executes its file, as a scorer does: in child processes with the same limits, each answer twice. Exit code 1 where
    right answers earn less than they must, or wrong ones more than they may.
    """
    trial = msgspec.json.encode(TrialOptions(**options)).decode()
    module = "prefixrl.learner.commands.try_reward"
    raise SystemExit(subprocess.call([sys.executable, "-m", module, trial]))
