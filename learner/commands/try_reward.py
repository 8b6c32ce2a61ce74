"""The process behind `prefixrl try-reward`: a reward, called on answers before any training.

options ──▶ config, problems, kept answers ──▶ trial ──▶ a table; exit code 1 where right answers earn too little
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.foreign.files import read_bytes, read_json
from prefixrl.common.config.load import changed, from_flags, from_json, load
from prefixrl.common.config.run import RewardConfig, RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.trials import TrialOptions, TriedAnswer
from prefixrl.common.host.exit_codes import exit_codes, printable
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import GroupScored
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.wire.messages.groups import Row, ScoredGroup, TextVerdict
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.check.reward_trial import Bounds, try_reward, writable
from prefixrl.learner.check.tried_answers import KEPT, PLACE, TOKEN_CHARS, Case, chosen
from prefixrl.learner.data import problems
from prefixrl.learner.data.rows import prompts

NOT_RIGHT = 1
"""Exit code where right answers earn too little, or wrong ones too much."""
MOST_KEPT = 256
"""Most kept answers that are tried."""
CONFIG_FILE = "config.json"


def config_of(options: TrialOptions) -> RunConfig:
    """Return the run whose reward is tried; raises ConfigError."""
    settings = options.settings
    if options.data is not None:
        settings = (f"data.train={json.dumps(str(Path(options.data).resolve()))}", *settings)
    if options.reward.endswith(".toml") or Path(options.reward).is_file():
        return load(Path(options.reward), settings)
    function_ref = user_function.resolve(user_function.PLUGGED_IN, options.reward, Path.cwd())
    if options.run is not None:
        text = read_bytes(Path(options.run) / CONFIG_FILE, "the config of the run")
        config = from_json(text, f"{options.run}/{CONFIG_FILE}")
        rewarded = config.model_copy(update={"reward": RewardConfig(function=function_ref)})
        return changed(rewarded, settings, "the command line")
    if options.data is None:
        raise ConfigError(
            f"{options.reward} is a function: which problems is it to reward? Give --data FILE or --run RUN"
        )
    document: dict[str, Any] = {
        "directory": ".",
        "mode": "direct",
        "adapter": {"model": "any/model"},
        "data": {"epochs": 1},
        "reward": {"function": function_ref},
    }
    return from_flags(document, settings)


def kept_cases(directory: Path) -> list[Case]:
    """Return answers that the journal of a run has, of groups from all of it; raises ConfigError without any."""
    check_format(directory)
    if not journal.exists(directory / journal.FOLDER):
        raise ConfigError(f"{directory} holds no run (no journal in {directory / journal.FOLDER})")
    groups = _groups_with_texts(directory)
    if not groups:
        raise ConfigError(
            f"{directory}: its journal has no answers; a run keeps them with scorer.keep_completions = true"
        )
    is_direct = read_json(directory / CONFIG_FILE, dict[str, Any])["mode"] == "direct"
    return [case for group in groups for case in _cases_of(group, is_direct)][:MOST_KEPT]


def _groups_with_texts(directory: Path) -> list[ScoredGroup]:
    """Return groups at equal distances in the journal, with no more answers than are tried, or little more."""
    groups: list[ScoredGroup] = []
    stride, count = 1, 0
    for record in journal.read(directory / journal.FOLDER):
        if not isinstance(record, GroupScored) or not any(_texts(record.group)):
            continue
        if count % stride == 0:
            groups.append(record.group)
        count += 1
        # Half of them go, so that those that stay are spread over all that was read.
        while len(groups) > 1 and sum(len(group.texts) for group in groups) > 2 * MOST_KEPT:
            groups, stride = groups[::2], 2 * stride
    return groups


def _texts(group: ScoredGroup) -> Iterator[tuple[Row, TextVerdict]]:
    for row, verdict in group.judged_rows:
        yield from ((row, text) for text in verdict.texts if text.is_judged and text.completion)


def _cases_of(group: ScoredGroup, is_direct: bool) -> Iterator[Case]:
    problem = group.prefixes.prompt
    for row, verdict in _texts(group):
        written = token_ids(row.tokens).size if is_direct else verdict.completion_tokens
        answer = TriedAnswer(
            text=verdict.completion,
            gold=problem.gold,
            question=problem.question,
            code=problem.code,
            tokens=int(written) or len(verdict.completion) // TOKEN_CHARS + 1,
            is_cut=verdict.finish == "length",
            prefix="" if is_direct else row.text or "",
            source=problem.source,
        )
        yield Case(KEPT, problem.prompt_id, answer, verdict.outcome, group.prefixes.seq)


def run_trial(options: TrialOptions) -> int:
    """Try the reward and print the table; return the exit code; raises ConfigError, DataError or PeerLost."""
    if options.form is not None and PLACE not in options.form:
        raise ConfigError(f"--form {options.form!r} has no {PLACE}, the place of the gold answer")
    config = config_of(options)
    kept_answers = [] if options.run is None else kept_cases(Path(options.run))
    able = writable(config, prompts(problems.training(config)))
    trial = try_reward(
        config,
        chosen(able, options.problems, config.seed),
        options.form,
        Bounds(options.least_right, options.most_wrong),
        kept_answers,
    )
    for line in trial.lines():
        sys.stdout.write(f"{printable(line)}\n")
    return 0 if trial.is_right else NOT_RIGHT


if __name__ == "__main__":
    with exit_codes():
        raise SystemExit(run_trial(msgspec.json.decode(sys.argv[1], type=TrialOptions)))
