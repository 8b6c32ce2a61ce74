"""Sentences about a missing batch: groups and holders it waits for, or why none comes."""

from dataclasses import dataclass
from typing import Literal

from prefixrl.common.config.filter import FilterConfig
from prefixrl.learner.broker.groups.filtering import PassRate, Starved
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.window import NotYetChosen
from prefixrl.learner.broker.workers.dispatch import Dispatcher

NAMED_GROUPS = 2


@dataclass(frozen=True)
class Awaited:
    """The present obstacle to a batch, as a word that is counted and as text for a person."""

    cause: Literal["rollouts", "scorers", "report"]
    text: str
    is_short: bool = False
    """True if fewer groups are scored than an iteration takes; else it waits for one that is due."""


def awaited_groups(ledger: Ledger, text: str) -> Awaited:
    """Return the wait for groups, of which `text` tells."""
    states, batch_groups = ledger.states(), ledger.window.batch_groups
    sampled = sum(states.get(state, 0) for state in ("sampled", "scoring", "scored"))
    return Awaited("scorers" if sampled >= batch_groups else "rollouts", text, states.get("scored", 0) < batch_groups)


def groups_in_words(dispatcher: Dispatcher, wait: NotYetChosen, now_s: float) -> str:
    """Name the groups that an iteration waits for, with their holders; a look at every task."""
    text, rate = _groups_with_holders(dispatcher, wait, now_s), dispatcher.ledger.pass_rate
    if rate and rate.judged:
        text += f"; {rate.passed} of the last {rate.judged} judged groups passed the filter"
    return text


def _groups_with_holders(dispatcher: Dispatcher, wait: NotYetChosen, now_s: float) -> str:
    registry = dispatcher.registry
    if not wait.for_seqs:
        rollouts = [f"{each.name} ({each.phase}, version {each.version})" for each in registry.of("rollout")]
        return f"prefixes from {', '.join(rollouts) or 'any rollout: none is connected'}"
    first, more = wait.for_seqs[:NAMED_GROUPS], len(wait.for_seqs) - NAMED_GROUPS
    holders = {
        seq: f"{worker.name} on {worker.host} for {now_s - lease.since_s:.0f} s"
        for worker in registry.by_identity.values()
        for lease in worker.leases.values()
        if lease.kind == "train"
        for seq in lease.item.seqs
        if seq in first
    }
    states = {group.seq: group.state for group in dispatcher.ledger.live() if group.seq in first}
    named = [f"{seq} ({states.get(seq, 'ended')}, {holders.get(seq, 'queued')})" for seq in first]
    return f"groups {', '.join(named)}{f' and {more} more' if more > 0 else ''}"


def why_no_batch(ledger: Ledger, limits: FilterConfig, iteration: int, starved: Starved) -> str:
    """Return why an iteration will never get its batch, and what a person can do about it."""
    causes = ", ".join(f"{count} {cause}" for cause, count in ledger.counts.causes.items())
    newest = f"; the newest error: {ledger.newest_error}" if ledger.newest_error else ""
    ended, failures = f"(ended so far: {causes or 'nothing'}{newest})", ledger.failures
    if starved.why == "failures":
        return (
            f"iteration {iteration} gets no batch: {failures.share:.0%} of the rows of the last {len(failures.newest)} "
            f"groups could not be sampled or judged, more than broker.max_failure_share = {failures.most:g} {ended}; "
            f"mend what fails, or raise the limit"
        )
    return f"iteration {iteration} gets no batch: {_nothing_passed(limits, ledger.pass_rate, starved)} {ended}"


def _nothing_passed(limits: FilterConfig, rate: PassRate | None, starved: Starved) -> str:
    if rate is None:
        return "all problems are used up and none could be sampled and judged"
    keys, remedies = [], []
    if limits.accuracy is not None:
        keys.append(f"filter.accuracy = [{limits.accuracy[0]:g}, {limits.accuracy[1]:g}]")
        remedies.append("widen the band, raise algorithm.samples_per_prompt")
    if limits.truncated is not None:
        keys.append(f"filter.truncated = {limits.truncated!r}")
        remedies.append("raise the length limit")
    share = f"{rate.passed} of the last {rate.judged} judged groups passed {' and '.join(keys)}"
    remedy = f"{', '.join(remedies)}, or train on other problems"
    if starved.why == "data":
        return f"all problems are used up and {share}; {remedy}"
    lower = ", lower filter.min_pass_rate" if rate.passed else ""
    return (
        f"{share}, fewer than filter.min_pass_rate = {limits.min_pass_rate:g} of them or none; {remedy}, or move "
        f"the limit (raise filter.limit_batches{lower})"
    )
