"""Print what fixed prefixes earn on training problems of a run, and what the best of them for each problem would.

    prefixrl headroom RUN

An adapter that chooses among these prefixes can earn at most the last line. Where that is hardly above the best single
prefix, nothing is to be learnt; where it is near 0, no prefix of these helps the target. RUN has judged the prefixes of
`evaluation.fixed_prefixes`, and no prefix at all, on `evaluation.selection_problems` training problems; a run of three
iterations is enough.
"""

import json
from collections import defaultdict
from pathlib import Path

import click


def rewards_by_prefix(run: Path) -> dict[str, dict[str, float]]:
    """The reward of each problem after each prefix; raises ClickException for a run that judged none."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for path in sorted(run.glob("evaluations/candidate-*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found[row["prefix"]][row["prompt_id"]] = row["reward"]
    if not found:
        raise click.ClickException(
            f"{run} holds no judged prefixes: it has not ended, or has no data.eval"
        )
    return found


def best_of_each(rewards: dict[str, dict[str, float]]) -> list[float]:
    """The highest reward of each problem that was judged after all prefixes."""
    judged = set.intersection(*(set(of_prefix) for of_prefix in rewards.values()))
    return [max(of_prefix[problem] for of_prefix in rewards.values()) for problem in judged]


@click.command("headroom")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(run: Path) -> None:
    """Print the mean reward of each prefix, and of the best one for each problem."""
    rewards = rewards_by_prefix(run)
    means = {prefix: sum(each.values()) / len(each) for prefix, each in rewards.items()}
    for prefix, mean in sorted(means.items(), key=lambda item: item[1]):
        click.echo(f"{mean:.3f}  {prefix!r}")
    best = best_of_each(rewards)
    click.echo(
        f"{sum(best) / len(best):.3f}  the best of these for each problem ({len(best)} problems)"
    )


if __name__ == "__main__":
    main()
