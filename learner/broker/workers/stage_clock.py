"""The clock of live groups between two stages of their way. Pure."""

from collections.abc import Iterable


class StageClock:
    """Waiting times of live groups, for a scorer, then for their iteration; time is passed in."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}

    def came_in(self, seqs: Iterable[int], now_s: float) -> None:
        """Note that prefixes or scores of these groups arrived."""
        self._since_s.update(dict.fromkeys(seqs, now_s))

    def leased(self, seqs: Iterable[int], now_s: float) -> None:
        """Note that a scorer got these groups."""
        for seq in seqs:
            self._queued_s[seq] = now_s - self._since_s.pop(seq, now_s)

    def waits_s(self, seq: int, now_s: float) -> tuple[float, float]:
        """Return the seconds a scored group waited for a scorer and, until now, for its iteration."""
        return self._queued_s.get(seq, 0.0), now_s - self._since_s.get(seq, now_s)

    def forget_all_but(self, live: set[int]) -> None:
        """Drop the times of groups that ended."""
        for times in (self._since_s, self._queued_s):
            for seq in times.keys() - live:
                del times[seq]
