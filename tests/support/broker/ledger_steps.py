"""Moves a ledger by hand: sample what the window allows, deliver verdicts for a group."""

from prefixrl.common.wire.messages.groups import Fault, GroupPrefixes, Row, ScoredGroup, VersionSpan
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.groups.ledger import Ledger
from support.broker.ledger_world import Places
from support.messages import verdict

ROW = Row(
    tokens=pack_tokens([1]),
    logprobs=pack_logprobs([-1.0]),
    finish="length",
    spans=(VersionSpan(0, "d", 1),),
)


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
    prompt = Places(None).prompt(ledger.prompt_index(seq))
    return GroupPrefixes(
        seq=seq, prompt=prompt, seed=seq, prompt_tokens=pack_tokens([1]), rows=(ROW, ROW)
    )


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
    prompt = Places(None).prompt(place)
    rows = len(rewards) + errors + cut
    group = GroupPrefixes(
        seq=seq, prompt=prompt, seed=seq, prompt_tokens=pack_tokens([1]), rows=(ROW,) * rows
    )
    verdicts = [verdict(reward) for reward in rewards]
    verdicts += [verdict(0.0, status="error", extracted="why", fault=fault)] * errors
    verdicts += [verdict(0.0, status="truncated", finish="length")] * cut
    result = ScoredGroup(
        prefixes=group, version=version, weights_digest="d", verdicts=tuple(verdicts), scorer="s"
    )
    ignored = ledger.counts.duplicates_ignored
    ledger.take_scores([result])
    return ledger.counts.duplicates_ignored == ignored
