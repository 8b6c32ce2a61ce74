"""Alarms of a run as spans of iterations. Pure."""

from collections.abc import Sequence

import msgspec

from prefixrl.common.run.documents import AlarmSpan, MetricsLine


def alarm_spans(lines: Sequence[MetricsLine]) -> list[AlarmSpan]:
    """Return every alarm that rang, in the order in which they began; `lines` are in order."""
    found: list[AlarmSpan] = []
    newest: dict[str, int] = {}
    for before, line in zip((None, *lines), lines, strict=False):
        for kind, text in line.alarms.items():
            if before is not None and kind in before.alarms:
                found[newest[kind]] = msgspec.structs.replace(found[newest[kind]], last=line.iteration)
            else:
                newest[kind] = len(found)
                found.append(AlarmSpan(kind, line.iteration, line.iteration, text))
    return found


def alarm_words(alarm: AlarmSpan) -> str:
    """Return an alarm in a line of text."""
    return f"ALARM, iterations {alarm.first} to {alarm.last}: {alarm.text}"
