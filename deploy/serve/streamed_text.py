"""The text of a growing answer: its safe part, and its end at a stop. Pure."""

from collections.abc import Callable, Sequence

from prefixrl.common.engines.interface.base import TokenIds

UNFINISHED = "\ufffd"
"""Stand-in for a character of which only some bytes are there."""


class StreamedText:
    """The text of one answer. What it gave out, end to end, is the whole answer."""

    def __init__(self, text_of: Callable[[TokenIds], str], stops: Sequence[str]) -> None:
        self._text_of, self._stops = text_of, tuple(stops)
        self._given = ""
        self.is_stopped = False
        """True once a stop text came; the answer ends before it."""

    def add(self, ids: TokenIds, is_last: bool) -> str:
        """Return the text that `ids`, all tokens so far, add to what was given out."""
        whole = self._text_of(ids)
        ends = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            whole = whole[: min(ends)]
        elif not is_last:
            whole = self._safe(whole)
        if not (self.is_stopped or is_last or whole.startswith(self._given)):
            return ""  # the tokenizer changed earlier text: more tokens may change it back
        new = whole[len(self._given) :]
        self._given += new
        return new

    def _safe(self, whole: str) -> str:
        """Return the text without an end that more tokens may change, or make a stop of."""
        whole = whole.rstrip(UNFINISHED)
        begun = (size for stop in self._stops for size in range(1, len(stop)) if whole.endswith(stop[:size]))
        return whole[: len(whole) - max(begun, default=0)]
