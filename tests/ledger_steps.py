"""Moves a ledger by hand: sample what the window allows, deliver verdicts for a group."""

from ledger_world import Places
from prefixrl.common.messages import (
    Fault,
    GroupPrefixes,
    Prompt,
    Row,
    ScoredGroup,
    Verdict,
    VersionSpan,
)
from prefixrl.common.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.ledger import Ledger

ROW = Row(pack_tokens([1]), pack_logprobs([-1.0]), "length", (VersionSpan(0, "d", 1),))


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
    prompt = Prompt(Places(None).identity(ledger.place(seq)), "?", "1")
    return GroupPrefixes(seq, prompt, seq, pack_tokens([1]), (ROW, ROW))


def score(
    ledger: Ledger,
    seq: int,
    *rewards: float,
    version: int = 0,
    errors: int = 0,
    fault: Fault = "process died",
    cut: int = 0,
) -> bool:
    """Deliver a group's verdicts, of `errors` rows without one and `cut` ones left out; whether the ledger took them."""
    place = {group.seq: group.prompt for group in ledger.live()}.get(seq, seq)
    prompt = Prompt(Places(None).identity(place), "?", "1")
    rows = len(rewards) + errors + cut
    group = GroupPrefixes(seq, prompt, seq, pack_tokens([1]), (ROW,) * rows)
    verdicts = [Verdict(reward, "ok", "", "eos", 1, 0) for reward in rewards]
    verdicts += [Verdict(0.0, "error", "why", "eos", 1, 0, fault=fault)] * errors
    verdicts += [Verdict(0.0, "truncated", "", "length", 1, 0)] * cut
    return bool(ledger.take_scores([ScoredGroup(group, version, "d", tuple(verdicts), "s")]))
