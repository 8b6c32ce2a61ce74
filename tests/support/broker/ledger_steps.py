"""Moves a ledger by hand: sample what the window allows, deliver verdicts for a group."""

from prefixrl.common.wire.messages.groups import Fault, GroupPrefixes, VersionSpan
from prefixrl.learner.broker.groups.ledger import Ledger
from support.broker.ledger_world import Places
from support.messages import group, row, scored_group, verdict

ROW = row([1], spans=(VersionSpan(0, "d", 1),))


def sample(ledger: Ledger, version: int = 0) -> list[int]:
    """Start and sample every group the window allows, and lease them for scoring."""
    seqs = []
    while (item := ledger.start_sampling(version)) is not None:
        ledger.take_prefixes([prefixes(ledger, seq) for seq in item.seqs], version, "d", 0.0)
        seqs += item.seqs
    while ledger.start_scoring():
        pass
    return seqs


def prefixes(ledger: Ledger, seq: int) -> GroupPrefixes:
    return group(seq, ROW, ROW, prompt=Places(None).prompt(ledger.prompt_index(seq)), seed=seq)


def score(
    ledger: Ledger,
    seq: int,
    *rewards: float,
    version: int = 0,
    errors: int = 0,
    fault: Fault = "process died",
    cut: int = 0,
) -> bool:
    """Deliver a group's verdicts, of `errors` rows without one and `cut` ones left out.

    Return True unless the ledger ignored them as a duplicate.
    """
    place = {group.seq: group.prompt for group in ledger.live()}.get(seq, seq)
    rows = (ROW,) * (len(rewards) + errors + cut)
    prefixes = group(seq, *rows, prompt=Places(None).prompt(place), seed=seq)
    verdicts = [verdict(reward) for reward in rewards]
    verdicts += [verdict(0.0, status="error", extracted="why", fault=fault)] * errors
    verdicts += [verdict(0.0, status="truncated", finish="length")] * cut
    judged = scored_group(prefixes, *verdicts, version=version, weights_digest="d", scorer="s")
    ignored = ledger.counts.duplicates_ignored
    ledger.take_scores([judged])
    return ledger.counts.duplicates_ignored == ignored
