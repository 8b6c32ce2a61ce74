"""The state of a run as a picture for a terminal, and as a line for a file. Reads nothing."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from prefixrl.common.process import printable
from prefixrl.common.run.documents import MetricsLine
from prefixrl.common.run.status import StatusDocument


def plain_line(document: StatusDocument, newest: MetricsLine | None) -> str:
    """Return the state of a run in one line."""
    busy = ", ".join(f"{role} {share:.0%}" for role, share in document.busy_fraction.items())
    queues = _listed(document.queues)
    reward = f"reward {newest.figures['reward']:.3f}, " if newest else ""
    if document.truncated_fraction:
        reward += f"cut by the length limit {document.truncated_fraction:.1%}, "
    waiting = f", waiting for {document.waiting_for}" if document.waiting_for else ""
    evaluated = f"; evaluations: {_evaluated(document)}" if document.evaluations.get("asked") else ""
    spent = f"; endpoint: {document.endpoint}" if document.endpoint else ""
    held_up = "".join(f"; {each}" for each in _held_up(document))
    loading = ", ".join(each.name for each in document.workers if each.phase == "loading")
    rest = f"{f'; loading: {loading}' if loading else ''}{spent}{held_up}{waiting}"
    if not document.total_iterations:
        return f"{_evaluated(document)}{f'; busy: {busy}' if busy else ''}{rest}"
    where = f"iteration {document.iteration}/{document.total_iterations}: {reward}"
    return f"{where}busy: {busy}; groups: {queues}{evaluated}{rest}"


def _held_up(document: StatusDocument) -> list[str]:
    """Return what workers wait for, and the functions of the user's that fail."""
    stuck = (each for each in document.workers if each.state.startswith(("waiting for ", "reward.function ")))
    return [f"{worker.name}: {worker.state}" for worker in stuck]


def _evaluated(document: StatusDocument) -> str:
    counts = {"asked": 0, "judged": 0, "failed": 0} | document.evaluations
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['judged']} of {counts['asked']} judged{failed}"


def picture(document: StatusDocument, newest: MetricsLine | None) -> Group:
    """Return the state of a run as a picture for a terminal."""
    head = Table.grid(padding=(0, 2))
    if document.total_iterations:
        _add_training(head, document, newest)
    if document.evaluations.get("asked"):
        head.add_row("evaluations", _evaluated(document))
    if document.causes:
        passes = f"{document.filter.passed} of {document.filter.judged}" if document.filter else ""
        head.add_row("ended untrained", _cell(_listed(document.causes)), "filter passes", passes)
    if cached := document.completions.get("cached"):
        head.add_row("completions from the cache", f"{cached} of {document.completions['judged']}")
    if document.row_errors:
        head.add_row("texts without a verdict", _listed(document.row_errors))
    if document.endpoint:
        head.add_row("the target's endpoint", str(document.endpoint))
    if document.waiting_for:
        head.add_row("the learner waits for", _cell(document.waiting_for))
    columns = "worker", "phase", "engine", "version", "tasks", "rows", "waiting", "busy", "tokens/s", "done", "state"
    workers = Table(*columns, box=None, padding=(0, 2))
    for each in document.workers:
        busy = "" if each.busy_fraction is None else f"{each.busy_fraction:.0%}"
        version = str(each.version) if each.role == "rollout" else ""
        rows, speed = f"{each.rows}/{each.seats}", f"{each.tokens_per_s:,.0f}"
        figures = version, str(each.leases), rows, str(each.waiting_rows), busy, speed, str(each.tasks_done)
        workers.add_row(each.name, each.phase, _cell(each.engine), *figures, _cell(each.state))
    engines = Table.grid(padding=(0, 2))
    for each in document.workers:
        if each.about:
            engines.add_row(each.name, _cell(each.about))
    # On lines of their own as well: a narrow terminal, and every pipe, cuts the last column of the table.
    return Group(head, *(_cell(each) for each in _held_up(document)), workers, engines)


def _cell(text: str) -> Text:
    """Return a worker's text as it is: rich would read markup in it."""
    return Text(printable(text))


def _add_training(head: Table, document: StatusDocument, newest: MetricsLine | None) -> None:
    where = f"{document.iteration} of {document.total_iterations}"
    head.add_row("iteration", where, "time left", _eta(document, newest))
    if newest:
        reward, entropy = newest.figures["reward"], newest.figures["entropy"]
        head.add_row("reward", f"{reward:.3f}", "entropy", f"{entropy:.3f}")
    head.add_row("cut by the length limit", f"{document.truncated_fraction:.1%} of the newest batch")
    ages = ", ".join(f"{age}: {count}" for age, count in document.age_histogram.items())
    head.add_row("trained groups by age", ages, "window", str(document.window))
    head.add_row("mean age", f"{document.mean_age:.2f}", "begun ahead", _ahead(document))
    if newest and newest.drift:
        shown = (f"{each.age}: {each.gap:.3f} nats, ESS {each.ess_fraction:.2f}" for each in newest.drift)
        head.add_row("drift by age", "; ".join(shown))
    if document.crossed_fraction:
        tokens = ", ".join(f"{age}: {count}" for age, count in document.token_age_histogram.items())
        crossed = f"{document.crossed_fraction:.1%} of the rows"
        head.add_row("trained tokens by age", tokens, "crossed an update", crossed)
    head.add_row("groups", _listed(document.queues))


def _ahead(document: StatusDocument) -> str:
    """Return what may be under way besides the batch in training, and the wait that set it."""
    admission = document.admission
    if admission.rule != "just_in_time" or not document.window:
        return "as early as the window allows"
    cap = f"at most {admission.cap_groups:.0f} beyond a batch by drift"
    waited = f"the learner waited {admission.waited_s:.1f} s for groups"
    return f"{admission.lead_groups:.0f} groups, just in time ({cap}; {waited})"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def _eta(document: StatusDocument, newest: MetricsLine | None) -> str:
    if not newest or not document.iteration:
        return "?"
    per_iteration_s = newest.since_start_s / (newest.iteration + 1)
    left_s = per_iteration_s * (document.total_iterations - document.iteration)
    return f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
