"""How long groups wait between the stages that workers measure. Pure: time is passed in.

Known only to the broker that saw it: after a restart the first groups are counted as if they had not waited.
"""

from collections.abc import Container, Iterable


class StageClock:
    """Since when each live group waits, first for a scorer, then for its iteration."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}

    def sampled(self, seqs: Iterable[int], now_s: float) -> None:
        """Prefixes came in."""
        self._since_s.update(dict.fromkeys(seqs, now_s))

    def leased(self, seqs: Iterable[int], now_s: float) -> None:
        """A scorer got the groups."""
        for seq in seqs:
            self._queued_s[seq] = now_s - self._since_s.pop(seq, now_s)

    def scored(self, seqs: Iterable[int], now_s: float) -> None:
        """Scores came in."""
        self._since_s.update(dict.fromkeys(seqs, now_s))

    def waits_s(self, seq: int, now_s: float) -> tuple[float, float]:
        """Seconds a scored group waited for a scorer and, until now, for its iteration."""
        return self._queued_s.get(seq, 0.0), now_s - self._since_s.get(seq, now_s)

    def forget_all_but(self, live: Container[int]) -> None:
        """Drop what is known of groups that ended."""
        for known in (self._since_s, self._queued_s):
            for seq in [seq for seq in known if seq not in live]:
                del known[seq]
