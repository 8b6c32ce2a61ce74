"""The state of a run in words and in a table of its workers. Reads nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.run.documents import MetricsLine, memory_words
from prefixrl.common.run.status import StatusDocument, WorkerStatus, shown_fields
from prefixrl.common.wire.messages.worker import MemoryUse
from prefixrl.deploy.runs.tables import cell, counted
from prefixrl.deploy.view.bottleneck import bottleneck_words
from prefixrl.deploy.view.stalls import stall_of

NAMED_WAIT_S = 10.0
"""Shorter waits are not named: every iteration has some."""
NAMED_WORKERS = 3
"""Largest number of troubled workers that are named."""
STANDS_STILL_S = 60.0
"""Time without an event after which the view says what is waited for; `launch.stall_s` may be longer."""
RECENT = 20
"""Number of iterations over which the time of an iteration is measured."""


@dataclass(frozen=True)
class Progress:
    """Facts that the files of a run add to the status of its broker."""

    newest: MetricsLine | None = None
    """None before the first iteration."""
    iteration_s: float | None = None
    """Seconds of a recent iteration."""
    is_saving: bool = False
    """True while a checkpoint is being written."""


def progress_of(recent: Sequence[MetricsLine], is_saving: bool) -> Progress:
    """Measure the time of an iteration over the newest lines, which are in order."""
    if not recent:
        return Progress(is_saving=is_saving)
    first = recent[-RECENT:][0]
    last = recent[-1]
    passed_s = last.since_start_s - first.since_start_s
    iterations = last.iteration - first.iteration
    if iterations <= 0 or passed_s <= 0.0:
        passed_s = last.since_start_s
        iterations = last.iteration + 1
    return Progress(last, passed_s / iterations, is_saving)


# --- words -----------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Return a share in words, as `30 %`."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Return a time that is left, as coarse as a person wants it."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def compact(number: float) -> str:
    """Return a number of three digits, as `1.4k`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{1 if number < 10 * size else 0}f}{unit}"
    return f"{number:.0f}"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Return counts in words, as `3 failed, 2 overran`."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def learner_phase(document: StatusDocument, progress: Progress) -> str:
    """Return what the learner does, in words."""
    match document.learner_phase:
        case "loading":
            return "loading its models"
        case "waiting" if document.learner_waits_s >= NAMED_WAIT_S:
            return f"waiting {document.learner_waits_s:.0f} s for {document.waiting_for}"
        case "publishing" if progress.is_saving:
            return "saving a checkpoint"
        case "ending":
            return f"judging held-out problems, {judged(document)}"
        case phase:
            return phase


def judged(document: StatusDocument) -> str:
    """Return the numbers of judged and of requested problems, in words."""
    counts = Counter(document.evaluations)
    if not counts["asked"]:
        return "nothing asked yet"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['judged']} of {counts['asked']} judged{failed}"


def is_held_up(worker: WorkerStatus) -> bool:
    """Return True for a worker that waits for an endpoint, or whose reward function fails."""
    return worker.activity in ("waiting", "failing")


def held_up(document: StatusDocument) -> list[str]:
    """Return what workers wait for, and the functions of the user's that fail."""
    stuck = [f"{each.name}: {each.state}" for each in document.workers if is_held_up(each)]
    more = len(stuck) - NAMED_WORKERS
    if more > 0:
        stuck[NAMED_WORKERS:] = [f"and {more} more workers that wait or fail"]
    if document.idle_s >= STANDS_STILL_S and document.total_iterations:
        stuck.insert(0, stall_of(document))
    return stuck


# --- the status line -------------------------------------------------------------------------------------------------


def status_line(document: StatusDocument, progress: Progress) -> str:
    """Return the state of a run in one line."""
    if not document.total_iterations:
        shares = document.busy_fraction.items()
        busy = ", ".join(f"{role} {percent(share)}" for role, share in shares)
        parts = [judged(document), f"busy: {busy}" if busy else "", *_remarks(document)]
        return "; ".join(filter(None, parts))
    trained = percent(min(1.0, document.iteration / document.total_iterations))
    parts = [f"it {document.iteration}/{document.total_iterations} {trained}"]
    if newest := progress.newest:
        tokens_per_s = sum(newest.tokens_per_s.get(role, 0.0) for role in ("rollout", "scorer"))
        formats = {
            "reward": "reward {:.2f}",
            "reference_kl": "KL {:.2g}",
            "entropy": "entropy {:.2f}",
        }
        for name, text in formats.items():
            if name in newest.figures:
                parts.append(text.format(newest.figures[name]))
        parts += [f"age {newest.mean_age:.1f}", f"{compact(tokens_per_s)} tok/s"]
    if document.iteration >= document.total_iterations:
        parts.append("training done")
    elif progress.iteration_s is not None:
        left_s = progress.iteration_s * (document.total_iterations - document.iteration)
        parts.append(f"{progress.iteration_s:.2g} s/it training left {duration(left_s)}")
    phase = learner_phase(document, progress)
    if not phase.startswith(("loading", "waiting ", "judging")):
        phase = ""
    return "; ".join(filter(None, [" ".join(parts), phase, *_remarks(document)]))


def _remarks(document: StatusDocument) -> Iterator[str]:
    """Yield what is wrong, and what costs money."""
    if loading := ", ".join(each.name for each in document.workers if each.phase == "loading"):
        yield f"loading: {loading}"
    if cut := document.truncated_fraction:
        yield f"cut by the length limit {percent(cut)}"
    if document.row_errors:
        yield f"texts without a verdict: {counts_in_words(document.row_errors)}"
    if document.endpoint:
        yield f"endpoint: {document.endpoint}"
    if document.ending:
        yield document.ending
    if document.drafts:
        yield f"drafts: {document.drafts}"
    if document.pools:
        yield f"problems: {document.pools}"
    yield from held_up(document)


# --- the picture -----------------------------------------------------------------------------------------------------


def picture(document: StatusDocument, progress: Progress, height: int | None = None) -> Group:
    """Return alarms, the status line and the workers; details too where the height has no limit."""
    alarms = progress.newest.alarms.values() if progress.newest else ()
    lines = [f"! {text}" for text in alarms]
    lower_lines = [f"{name}: {text}" for name, text in details(document, progress) if text]
    most = None
    if height is not None:
        # The log and the report say what to do about an alarm.
        lines = [line.partition("; ")[0] for line in lines]
        lower_lines = []
        most = max(1, height - 10)  # the status line and the alarms may need some lines each
    return Group(
        *(Text(printable(line), "bold red") for line in lines),
        cell(status_line(document, progress)),
        workers_table(document.workers, most),
        *map(cell, lower_lines),
    )


def in_order(workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    """Return workers by role and number: scorer-10 comes after scorer-9."""
    return sorted(workers, key=lambda each: (each.role, len(each.name), each.name))


def workers_table(
    workers: Sequence[WorkerStatus], most: int | None = None, is_wide: bool = False
) -> Table:
    """Return a row per worker; `is_wide`: also its host, process, engine and state."""
    workers = in_order(workers)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("worker", "phase", *(["host", "pid", "engine"] if is_wide else [])):
        table.add_column(name, no_wrap=True)
    for name in ("version", "rows", "waiting", "busy", "tokens/s", "done"):
        table.add_column(name, justify="right")
    if is_wide:
        table.add_column("state")
    for worker in workers[:most]:
        row = [
            worker.name,
            worker.phase,
            str(worker.version) if worker.role == "rollout" and worker.version >= 0 else "",
            f"{worker.rows}/{worker.seats}",
            compact(worker.waiting_rows),
            "" if worker.busy_fraction is None else percent(worker.busy_fraction),
            compact(worker.tokens_per_s),
            compact(worker.tasks_done),
        ]
        if is_wide:
            row[2:2] = [worker.host, str(worker.pid), worker.engine]
            row.append(worker.state)
        table.add_row(*map(cell, row))
    if most is not None and len(workers) > most:
        table.add_row(f"and {len(workers) - most} more")
    return table


def details(document: StatusDocument, progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield what the status line leaves out, by name; texts may be empty."""
    newest = progress.newest
    if newest:
        speeds = newest.tokens_per_s
        busy = newest.busy_fraction
        of_learner = [
            learner_phase(document, progress),
            f"busy {percent(busy['learner'])}" if "learner" in busy else "",
            f"{compact(speeds['learner'])} tokens/s" if "learner" in speeds else "",
        ]
        yield "learner", ", ".join(filter(None, of_learner))
        yield "learner's memory", memory_words(newest.ranks)
        if (norm := newest.figures.get("actor_grad_norm")) is not None:
            yield "grad norm", f"{norm:.3g}"
        if (share := newest.figures.get("commonest_text_fraction")) is not None:
            different = percent(newest.figures.get("distinct_texts_fraction", 0.0))
            yield "texts", f"the commonest in {percent(share)} of the rows, {different} differ"
    yield "bottleneck", _bottleneck(document, newest) if newest else ""
    for name, value in shown_fields(document):
        yield name, counts_in_words(value) if isinstance(value, dict) else str(value)
    if document.total_iterations:
        ages = counted(document.age_histogram) or "none"
        yield (
            "trained groups by age",
            f"{ages}; mean age {document.mean_age:.2f}, window {document.window}",
        )
        yield "begun ahead", _ahead(document)
        yield "held out", judged(document) if document.evaluations.get("asked") else ""
        yield "cut by the length limit", f"{document.truncated_fraction:.1%} of the newest batch"
    if newest:
        drift = (
            f"{each.age}: {each.gap:.3f} nats, ESS {each.ess_fraction:.2f}" for each in newest.drift
        )
        yield "drift by age", "; ".join(drift)
    if document.crossed_fraction:
        tokens = counted(document.token_age_histogram)
        crossed = f"{document.crossed_fraction:.1%} of the rows crossed an update"
        yield "trained tokens by age", f"{tokens}; {crossed}"
    yield "ended untrained", counts_in_words(document.causes)
    if document.filter:
        yield "the filter let pass", f"{document.filter.passed} of {document.filter.judged}"
    if cached := document.completions.get("cached"):
        yield "completions from the cache", f"{cached} of {document.completions['judged']}"
    yield "memory, shared pages divided", _memory(document.memory)
    workers = [
        each
        for each in document.workers
        if each.state not in ("", "idle", each.phase) and not is_held_up(each)
    ]
    yield "states", "; ".join(f"{each.name} {each.state}" for each in workers)
    yield from ((f"{each.name}, engine", each.about) for each in document.workers)


def _bottleneck(document: StatusDocument, newest: MetricsLine) -> str:
    """Return the part that holds the run up, of the newest iteration's learner and of the workers now."""
    learner = {role: share for role, share in newest.busy_fraction.items() if role == "learner"}
    counts = Counter(worker.role for worker in document.workers)
    return bottleneck_words(learner | document.busy_fraction, counts, document.window)


def _memory(sizes: Mapping[str, MemoryUse]) -> str:
    """Return the memory of each process, of the workers of a role together."""
    sizes_in_words = []
    for kind, names in grouped((name.partition("-")[0], name) for name in sizes).items():
        size_mib = sum(sizes[name].share_bytes for name in names) / 2**20
        processes = names[0] if len(names) == 1 else f"{len(names)} {kind}s"
        sizes_in_words.append(f"{processes} {size_mib:,.0f} MiB")
    return ", ".join(sizes_in_words)


def _ahead(document: StatusDocument) -> str:
    """Return what may be under way besides the batch in training, and the wait that set it."""
    admission = document.admission
    if admission.rule != "just_in_time" or not document.window:
        return "as early as the window allows"
    cap = f"at most {admission.cap_groups:.0f} beyond a batch by drift"
    waited = f"the learner waited {admission.waited_s:.1f} s for groups"
    return f"{admission.lead_groups:.0f} groups, just in time ({cap}; {waited})"
