"""The state of a run as a picture for a terminal, and as one line for a file. Reads nothing."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from prefixrl.common.host.process import printable
from prefixrl.common.run.documents import MetricsLine
from prefixrl.common.run.status import StatusDocument, WorkerStatus
from prefixrl.common.wire.messages.worker import MemoryUse
from prefixrl.deploy.view.stalls import stall_of

NAMED_WAIT_S = 10.0
"""Shorter waits are not named: every iteration has some."""
FIXED_LINES = 16
"""Lines of a picture besides a line per worker, mostly; workers that do not fit are summed up by role."""
NAMED_WORKERS = 3
"""Most workers whose trouble is told in full."""
STANDS_STILL_S = 60.0
"""Time without an event after which it is said what is waited for, whatever `launch.stall_s` says."""
BAR_CHARS = 20
RECENT = 20
"""Iterations that the time of one is measured over."""


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
    first, last = recent[-RECENT:][0], recent[-1]
    passed_s, iterations = last.since_start_s - first.since_start_s, last.iteration - first.iteration
    if iterations <= 0 or passed_s <= 0.0:
        passed_s, iterations = last.since_start_s, last.iteration + 1
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


def training_left(document: StatusDocument, progress: Progress) -> str:
    """Return the time until all iterations are trained; judging after them is not counted."""
    if document.iteration >= document.total_iterations:
        return "training done"
    if progress.iteration_s is None:
        return ""
    return f"training left {duration(progress.iteration_s * (document.total_iterations - document.iteration))}"


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
    """Return how many problems are judged, of those asked for."""
    counts = {"asked": 0, "judged": 0, "failed": 0} | document.evaluations
    if not counts["asked"]:
        return "nothing asked yet"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['judged']} of {counts['asked']} judged{failed}"


def held_up(document: StatusDocument) -> list[str]:
    """Return what workers wait for, and the functions of the user's that fail."""
    stuck = [each for each in document.workers if held_up_by(each)]
    more = len(stuck) - NAMED_WORKERS
    named = [f"{worker.name}: {worker.state}" for worker in stuck[:NAMED_WORKERS]]
    if document.idle_s >= STANDS_STILL_S and document.total_iterations:
        named.insert(0, stall_of(document))
    return [*named, *([f"and {more} more workers that wait or fail"] if more > 0 else [])]


def figures_of(line: MetricsLine, is_short: bool) -> list[str]:
    """Return the figures of an iteration that tell how training goes, in words."""
    figures, digits = line.figures, 2 if is_short else 3
    found = []
    if (reward := figures.get("reward")) is not None:
        found.append(f"reward {reward:.{digits}f}")
    if (divergence := figures.get("reference_kl")) is not None:
        found.append(f"KL {divergence:.2g}" if is_short else f"KL {divergence:.3g}")
    if (entropy := figures.get("entropy")) is not None:
        found.append(f"entropy {entropy:.{digits}f}")
    if (norm := figures.get("actor_grad_norm")) is not None and not is_short:
        found.append(f"grad norm {norm:.3g}")
    return [*found, f"age {line.mean_age:.1f}" if is_short else f"age {line.mean_age:.2f}"]


def engine_tokens_per_s(line: MetricsLine) -> float:
    """Return the tokens that rollouts and scorers wrote per second for the batch of a line."""
    return sum(line.tokens_per_s.get(role, 0.0) for role in ("rollout", "scorer"))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


# --- the line --------------------------------------------------------------------------------------------------------


def plain_line(document: StatusDocument, progress: Progress) -> str:
    """Return the state of a run in one line."""
    if not document.total_iterations:
        busy = ", ".join(f"{role} {percent(share)}" for role, share in document.busy_fraction.items())
        return "; ".join([judged(document), *([f"busy: {busy}"] if busy else []), *_remarks(document)])
    done = document.iteration / document.total_iterations
    parts = [f"it {document.iteration}/{document.total_iterations} {percent(done)}"]
    if progress.newest:
        parts += [*figures_of(progress.newest, is_short=True), f"{compact(engine_tokens_per_s(progress.newest))} tok/s"]
    if progress.iteration_s is not None:
        parts.append(f"{progress.iteration_s:.2g} s/it")
    where = " ".join([*parts, training_left(document, progress)]).rstrip()
    phase = learner_phase(document, progress)
    told = [phase] if phase.startswith(("loading", "waiting ", "judging")) else []
    return "; ".join([where, *told, *_remarks(document)])


def _remarks(document: StatusDocument) -> list[str]:
    """Return what is not as it should be, and what costs money."""
    loading = ", ".join(each.name for each in document.workers if each.phase == "loading")
    cut = document.truncated_fraction
    return [
        *([f"loading: {loading}"] if loading else []),
        *([f"cut by the length limit {percent(cut)}"] if cut else []),
        *([f"texts without a verdict: {_listed(document.row_errors)}"] if document.row_errors else []),
        *([f"endpoint: {document.endpoint}"] if document.endpoint else []),
        *held_up(document),
    ]


# --- the picture -----------------------------------------------------------------------------------------------------


def picture(document: StatusDocument, progress: Progress, width: int, height: int | None) -> Group:
    """Return the state of a run as a picture of at most so many lines; None: of any number."""
    parts: list[tuple[bool, RenderableType]] = []
    if progress.newest:
        # What to do about it stands in the log and in the report.
        texts = [text if height is None else text.partition("; ")[0] for text in progress.newest.alarms.values()]
        parts += [(True, Text(f"! {text}", "bold red")) for text in texts]
    parts.append((True, _head(document, progress)))
    # On lines of their own: a narrow terminal, and every pipe, cuts the last column of a table.
    parts += [(True, cell(each)) for each in held_up(document)]
    parts.append((True, workers_table(document.workers, None if height is None else max(4, height - FIXED_LINES))))
    parts += [(False, each) for each in _more(document, progress)]
    return Group(*_fitting(parts, width, height))


def _fitting(parts: list[tuple[bool, RenderableType]], width: int, height: int | None) -> list[RenderableType]:
    """Return all parts that must be seen, and of the others those that fit."""
    measure = Console(file=io.StringIO(), width=width)
    sizes = [len(measure.render_lines(part, pad=False)) for _, part in parts]
    due = sum(size for size, (is_due, _) in zip(sizes, parts, strict=True) if is_due)
    left = sum(sizes) if height is None else height - due
    found = []
    for size, (is_due, part) in zip(sizes, parts, strict=True):
        if is_due or size <= left:
            left -= 0 if is_due else size
            found.append(part)
    return found


def cell(text: str) -> Text:
    """Return a worker's text as it is: rich would read markup in it."""
    return Text(printable(text))


def _head(document: StatusDocument, progress: Progress) -> Table:
    head = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    if document.total_iterations:
        done = min(1.0, document.iteration / document.total_iterations)
        filled = round(BAR_CHARS * done)
        bar = "━" * filled + "─" * (BAR_CHARS - filled)
        left = f"  {training_left(document, progress)}"
        head.add_row("iteration", f"{document.iteration} of {document.total_iterations}  {bar} {percent(done)}{left}")
        phase, _, awaited = learner_phase(document, progress).partition(" for ")
        head.add_row("learner", cell(", ".join([phase or "?", *_of_learner(progress)])))
        if awaited:
            head.add_row("waits for", cell(awaited))
        if progress.newest:
            head.add_row("newest", ", ".join(figures_of(progress.newest, is_short=False)))
    counts = document.evaluations
    if counts.get("asked"):
        head.add_row("held out", judged(document))
    if document.row_errors:
        head.add_row("no verdict", cell(_listed(document.row_errors)))
    return head


def _of_learner(progress: Progress) -> list[str]:
    if not progress.newest:
        return []
    speeds, busy = progress.newest.tokens_per_s, progress.newest.busy_fraction
    return [
        *([f"busy {percent(busy['learner'])}"] if "learner" in busy else []),
        *([f"{compact(speeds['learner'])} tokens/s"] if "learner" in speeds else []),
        *([f"{progress.iteration_s:.2g} s per iteration"] if progress.iteration_s is not None else []),
    ]


def workers_table(workers: Sequence[WorkerStatus], most: int | None) -> Table:
    """Return a row per worker, or per role where there are more than `most`."""
    engines = len({each.engine for each in workers if each.engine}) > 1
    is_summed = most is not None and len(workers) > most
    names = ["worker", "phase", *(["engine"] if engines else [])]
    numbers = ["version", "rows", "waiting", "busy", "tokens/s", "done"]
    columns = [Column(each, no_wrap=True) for each in names]
    columns += [Column(each, overflow="fold", justify="right") for each in numbers]
    table = Table(*columns, box=None, padding=(0, 1 if engines else 2, 0, 0))
    workers = sorted(workers, key=lambda each: (each.role, len(each.name), each.name))
    roles = dict.fromkeys(each.role for each in workers)
    rows = [[each] for each in workers]
    if is_summed:
        rows = [[each for each in workers if each.role == role] for role in roles]
    for each in rows:
        name = f"{len(each)} {each[0].role}s" if is_summed else each[0].name
        found = [name, _joined([one.phase for one in each], is_summed)]
        found += [_joined([one.engine for one in each], False)] if engines else []
        table.add_row(*map(cell, [*found, *_numbers(each)]))
    return table


def _numbers(workers: Sequence[WorkerStatus]) -> list[str]:
    versions = sorted({each.version for each in workers if each.role == "rollout" and each.version >= 0})
    shares = [each.busy_fraction for each in workers if each.busy_fraction is not None]
    version = "" if not versions else str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"
    return [
        version,
        f"{sum(each.rows for each in workers)}/{sum(each.seats for each in workers)}",
        compact(sum(each.waiting_rows for each in workers)),
        percent(sum(shares) / len(shares)) if shares else "",
        compact(sum(each.tokens_per_s for each in workers)),
        compact(sum(each.tasks_done for each in workers)),
    ]


def _joined(words: list[str], is_counted: bool) -> str:
    """Return the different words of some workers, with how many have each."""
    kinds = list(dict.fromkeys(word for word in words if word))
    if not is_counted or len(kinds) == 1:
        return ", ".join(kinds)
    return ", ".join(f"{words.count(kind)} {kind}" for kind in kinds)


def _more(document: StatusDocument, progress: Progress) -> list[RenderableType]:
    """Return what is shown where there is room, the most telling first."""
    rows: list[tuple[str, str]] = []
    newest = progress.newest
    if document.queues:
        rows.append(("groups", _listed(document.queues)))
    if newest and (share := newest.figures.get("commonest_text_fraction")) is not None:
        different = newest.figures.get("distinct_texts_fraction", 0.0)
        rows.append(
            ("texts", f"the commonest in {percent(share)} of the rows, {percent(different)} are different ones")
        )
    if document.total_iterations:
        ages = ", ".join(f"{age}: {count}" for age, count in document.age_histogram.items()) or "none"
        rows.append(("trained groups by age", f"{ages}; mean age {document.mean_age:.2f}, window {document.window}"))
        rows.append(("begun ahead", _ahead(document)))
        rows.append(("cut by the length limit", f"{document.truncated_fraction:.1%} of the newest batch"))
    if newest and newest.drift:
        shown = (f"{each.age}: {each.gap:.3f} nats, ESS {each.ess_fraction:.2f}" for each in newest.drift)
        rows.append(("drift by age", "; ".join(shown)))
    if document.crossed_fraction:
        tokens = ", ".join(f"{age}: {count}" for age, count in document.token_age_histogram.items())
        rows.append(
            ("trained tokens by age", f"{tokens}; {document.crossed_fraction:.1%} of the rows crossed an update")
        )
    if document.causes:
        rows.append(("ended untrained", _listed(document.causes)))
    if document.filter:
        rows.append(("the filter let pass", f"{document.filter.passed} of {document.filter.judged}"))
    if cached := document.completions.get("cached"):
        rows.append(("completions from the cache", f"{cached} of {document.completions['judged']}"))
    if document.endpoint:
        rows.append(("the target's endpoint", str(document.endpoint)))
    told = [each for each in document.workers if each.state not in ("", "idle", each.phase) and not held_up_by(each)]
    if document.memory:
        rows.append(("memory, shared pages divided", _memory(document.memory)))
    if told:
        rows.append(("states", "; ".join(f"{each.name} {each.state}" for each in told)))
    rows += [(f"{each.name}, engine", each.about) for each in document.workers if each.about]
    return [cell(f"{name}: {text}") for name, text in rows]


def _memory(sizes: dict[str, MemoryUse]) -> str:
    """Return the memory of each process, of the workers of a role together."""
    kinds: dict[str, list[str]] = {}
    for name in sizes:
        kinds.setdefault(name.partition("-")[0], []).append(name)
    found = []
    for kind, names in kinds.items():
        size_mib = sum(sizes[name].share_bytes for name in names) / 2**20
        found.append(f"{names[0] if len(names) == 1 else f'{len(names)} {kind}s'} {size_mib:,.0f} MiB")
    return ", ".join(found)


def held_up_by(worker: WorkerStatus) -> bool:
    """Return True for a worker that waits for something, or whose reward function fails."""
    return worker.activity in ("waiting", "failing")


def _ahead(document: StatusDocument) -> str:
    """Return what may be under way besides the batch in training, and the wait that set it."""
    admission = document.admission
    if admission.rule != "just_in_time" or not document.window:
        return "as early as the window allows"
    cap = f"at most {admission.cap_groups:.0f} beyond a batch by drift"
    waited = f"the learner waited {admission.waited_s:.1f} s for groups"
    return f"{admission.lead_groups:.0f} groups, just in time ({cap}; {waited})"


EVERY_S = 10.0
"""Time between two lines of a run that goes well, about."""
SILENT_S = 60.0
"""Longest time without a line."""


class Rhythm:
    """Tells when a line is due: every so many iterations, and at once for what changes."""

    def __init__(self) -> None:
        self._said_s = -math.inf
        self._iteration = self._judged = -1
        self._phase = ""
        self._stuck: frozenset[str] = frozenset()
        self._wait_steps = 0

    def is_due(self, now_s: float, document: StatusDocument, progress: Progress) -> bool:
        """Return True if the line of this moment is to be printed; it is taken as printed then."""
        phase = {"loading": "loading", "ending": "ending"}.get(document.learner_phase, "training")
        stuck = frozenset(each.name for each in document.workers if held_up_by(each))
        # A wait is named after 10 s and then each time that it has doubled.
        waits_s = document.learner_waits_s
        steps = 1 + int(math.log2(waits_s / NAMED_WAIT_S)) if waits_s >= NAMED_WAIT_S else 0
        judged_so_far = document.evaluations.get("judged", 0)
        is_new = phase != self._phase or bool(stuck - self._stuck) or steps > self._wait_steps
        passed_s = now_s - self._said_s
        every = iterations_per_line(progress.iteration_s)
        has_advanced = document.iteration // every > self._iteration // every and passed_s >= EVERY_S / 2
        is_judging = phase == "ending" or not document.total_iterations
        has_judged = is_judging and judged_so_far != self._judged and passed_s >= EVERY_S
        self._wait_steps = steps
        if not (is_new or has_advanced or has_judged or passed_s >= SILENT_S):
            return False
        self._said_s, self._phase, self._stuck = now_s, phase, stuck
        self._iteration, self._judged = document.iteration, judged_so_far
        return True


def iterations_per_line(iteration_s: float | None) -> int:
    """Return how many iterations take about `EVERY_S`: 1, 2 or 5 times a power of ten."""
    wanted = EVERY_S / iteration_s if iteration_s else 1.0
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power >= wanted:
                return step * power
        power *= 10
