"""What the two modes of a run are, and which keys of the run file mean something in one of them only."""

from collections.abc import Mapping
from typing import Literal

from prefixrl.common.section import Section

Mode = Literal["prefix", "direct"]

_NO_ENGINE = "its scorers run no engine"
_NO_ARM = "there is no target to give a fixed prefix to"

ONLY_IN: dict[tuple[str, str], tuple[Mode, str]] = {
    ("rollout", "prefix_tokens"): ("prefix", "the length of an answer is rollout.answer_tokens"),
    ("rollout", "answer_tokens"): ("direct", "the length of a prefix is rollout.prefix_tokens"),
    ("scorer", "engine"): ("prefix", _NO_ENGINE),
    ("scorer", "max_new_tokens"): ("prefix", _NO_ENGINE),
    ("scorer", "temperature"): ("prefix", _NO_ENGINE),
    ("scorer", "top_k"): ("prefix", _NO_ENGINE),
    ("scorer", "top_p"): ("prefix", _NO_ENGINE),
    ("scorer", "min_p"): ("prefix", _NO_ENGINE),
    ("scorer", "max_prompt_tokens"): ("prefix", _NO_ENGINE),
    ("scorer", "device"): ("prefix", _NO_ENGINE),
    ("scorer", "threads"): ("prefix", _NO_ENGINE),
    ("scorer", "vllm"): ("prefix", _NO_ENGINE),
    ("scorer", "openai"): ("prefix", _NO_ENGINE),
    ("scorer", "continuations"): ("prefix", _NO_ENGINE),
    ("scorer", "cache_bytes"): ("prefix", _NO_ENGINE),
    ("simulated", "completion_s"): ("prefix", _NO_ENGINE),
    ("simulated", "completion_sigma"): ("prefix", _NO_ENGINE),
    ("simulated", "accuracy"): ("prefix", _NO_ENGINE),
    ("evaluation", "max_new_tokens"): (
        "prefix",
        "evaluated answers have rollout.answer_tokens too",
    ),
    ("evaluation", "fixed_prefixes"): ("prefix", _NO_ARM),
    ("evaluation", "selection_problems"): ("prefix", _NO_ARM),
    ("evaluation", "sampled_candidates"): ("prefix", _NO_ARM),
}
"""Section and key, the mode it belongs to, and why it means nothing in the other one."""


def without_meaning(mode: Mode, sections: Mapping[str, object], is_run_file: bool) -> list[str]:
    """A sentence for every key that is given and means nothing in this mode.

    Args:
        sections: the sections of a run by name.
        is_run_file: a key given at its default counts as given; in a resolved config, which names every key, it does not.
    """
    said = []
    for (section, key), (own, reason) in ONLY_IN.items():
        table = sections[section]
        assert isinstance(table, Section)
        if mode != own and table.is_given(key, is_run_file):
            said.append(
                f'{section}.{key} = {getattr(table, key)!r} has no meaning with mode = "{mode}": {reason}; leave it out, or '
                f'use mode = "{own}"'
            )
    return said
