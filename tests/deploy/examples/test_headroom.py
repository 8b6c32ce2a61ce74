"""The room above fixed prefixes, from those that a run judged: the best one of each problem."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from prefixrl.deploy.examples.headroom import main


def asked(run: Path, *judged: tuple[str, dict[str, float]]) -> Result:
    """The command on a run that judged these prefixes."""
    (run / "evaluations").mkdir()
    for number, (prefix, rewards) in enumerate(judged):
        rows = [
            {"prefix": prefix, "prompt_id": problem, "reward": reward}
            for problem, reward in rewards.items()
        ]
        path = run / f"evaluations/candidate-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(main, [str(run)], catch_exceptions=False)


def test_the_best_of_each_problem_is_of_those_judged_after_every_prefix(tmp_path: Path) -> None:
    printed = asked(tmp_path, ("One:", {"a": 1.0, "b": 0.0, "c": 1.0}), ("", {"b": 0.5, "a": 0.0}))
    assert printed.output.splitlines() == [
        "0.250  ''",
        "0.667  'One:'",
        "0.750  the best of these for each problem (2 problems)",
    ]


def test_a_run_that_judged_no_prefix_is_refused(tmp_path: Path) -> None:
    refused = asked(tmp_path)
    assert refused.exit_code == 1 and "holds no judged prefixes" in refused.output
