"""Settings that differ between two configs of one run, and those that may; the record of changes in a run."""

from collections.abc import Iterator

import msgspec

CHANGES_FILE = "changes.jsonl"
WEIGHTS_KEY = "version of the weights"
"""Key of the line about a way back of `algorithm.on_collapse`."""
FREE_SECTIONS = ("launch", "checkpoint", "evaluation", "broker", "slurm", "log")
KeyPath = tuple[str, ...]
_FREE = {
    ("rollout",): "device threads vllm",
    ("filter",): "limit_batches min_pass_rate",
    ("scorer",): "device threads vllm verifier_children",
    ("scorer", "prm"): "device gpu_memory_utilization",
    (
        "scorer",
        "openai",
    ): "url key_variable requests request_s patience_s requests_per_minute tokens_per_minute "
    "prompt_price completion_price most_cost",
    ("learner",): "device threads micro_batch_tokens batch_timeout_s collective_timeout_s",
}
FREE_KEYS: frozenset[KeyPath] = frozenset(
    (*path, key) for path, keys in _FREE.items() for key in keys.split()
) | {(section,) for section in FREE_SECTIONS}
"""Keys and sections that may differ when a run is resumed: none of them changes what is trained. A served
target may move to another address, but must stay the same model."""


class ChangeLine(msgspec.Struct, frozen=True):
    """One setting that changed between two iterations: by `prefixrl resume`, or as the answer to a collapse."""

    time_s: float
    """Seconds since 1970."""
    iteration: int
    """Iterations that were trained before it. The change acts on those after it."""
    key: str
    before: object
    after: object
    reason: str = ""
    """Alarm that the change answers; "" where a person made it."""


def changes_between(
    before: object, after: object, free: frozenset[KeyPath], key: KeyPath = ()
) -> Iterator[str]:
    """Yield a line per key that differs and is not free, of two configs as documents."""
    if before == after or key in free:
        return
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name in after:
            yield from changes_between(before[name], after[name], free, (*key, name))
    else:
        yield f"{'.'.join(key)}: {before!r} -> {after!r}"


def settings_besides(
    document: object, free: frozenset[KeyPath], key: KeyPath = ()
) -> Iterator[tuple[str, object]]:
    """Yield name and value of every key of a config's document that is not free."""
    if key in free:
        return
    if isinstance(document, dict):
        for name, value in document.items():
            yield from settings_besides(value, free, (*key, name))
    else:
        yield ".".join(key), document
