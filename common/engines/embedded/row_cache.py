"""Keys and values of rows that join and leave, in one block per layer.

    columns     0 .. low ........................ at ... capacity
    row 0           |          [text ...........]|
    row 1           |[text .....................]|          the next forward writes column `at` of every row
    row 2           |    [head .....]  [tail ...]|          what stands between and before is hidden by the mask

All rows end at the same column, so a decoding step copies nothing. A row that leaves is overwritten by the last one.
Full blocks are made again, a quarter wider than what is in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from prefixrl.common.config.run import SPARE_COLUMNS

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, shape (rows, heads, columns, size of a head) each."""
LEAST_COLUMNS = 64


@dataclass
class _Place:
    """The part of the blocks that is in use."""

    rows: int = 0
    low: int = 0
    """First column of the longest row."""
    at: int = 0
    starts: list[int] = field(default_factory=list)


class _Block(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False  # all columns are kept: a sliding window is in the model's own mask

    def __init__(self, place: _Place, like: KeysAndValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self.tensors: KeysAndValues = (like[0][:0, :, :0], like[1][:0, :, :0])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("rows join before they are decoded")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        rows = self._place.rows
        low = self._place.low
        at = self._place.at
        keys, values = self.tensors
        keys[:rows, :, at : at + 1] = key_states
        values[:rows, :, at : at + 1] = value_states
        return keys[:rows, :, low : at + 1], values[:rows, :, low : at + 1]

    def get_seq_length(self) -> int:
        return self._place.at - self._place.low

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The rows under way, in the order in which the next forward takes them."""

    def __init__(self, seats: int) -> None:
        """Begin without rows; `seats` is the usual number of rows."""
        self._seats = seats
        self._place = _Place()
        self._blocks: list[_Block] = []
        super().__init__(layers=self._blocks)  # type: ignore[arg-type]
        self._mask = torch.zeros(0, 0, dtype=torch.bool)

    def clear(self) -> None:
        """Let all rows leave."""
        place = self._place
        place.rows = place.low = place.at = 0
        place.starts.clear()

    def join(self, computed: Sequence[KeysAndValues], mask: Tensor, source: Sequence[int]) -> None:
        """Append rows, the i-th being row `source[i]` of a forward, whose `mask` tells text from padding."""
        place = self._place
        width = mask.shape[1]
        first = place.rows
        after = place.rows + len(source)
        if not self._blocks:
            self._blocks += [_Block(place, each) for each in computed]
            self._mask = self._mask.to(mask.device)
        self._make_room(after, width)
        index = torch.tensor(source, device=mask.device)
        begin = place.at - width
        for block, layer in zip(self._blocks, computed, strict=True):
            for stored, computed_part in zip(block.tensors, layer, strict=True):
                stored[first:after, :, begin : place.at] = computed_part[index]
        self._mask[first:after] = False
        self._mask[first:after, begin : place.at] = mask[index]
        padding = mask.int().argmax(dim=1).tolist()
        place.starts += [begin + padding[each] for each in source]
        place.rows, place.low = after, min(place.starts)

    def begin_step(self) -> Tensor:
        """Open a column for one more token of every row; return the mask of its forward."""
        place = self._place
        self._make_room(place.rows, 0)
        self._mask[: place.rows, place.at] = True
        return self._mask[: place.rows, place.low : place.at + 1]

    def end_step(self) -> None:
        """Keep the column that the forward filled."""
        self._place.at += 1

    def fork(self, source: Sequence[int]) -> None:
        """Append a copy of each of these rows: a text that goes on in another way."""
        if not source:
            return
        place = self._place
        first = place.rows
        after = place.rows + len(source)
        self._make_room(after, 0)
        self._copy(slice(first, after), torch.tensor(source, device=self._mask.device))
        place.starts += [place.starts[each] for each in source]
        place.rows = after

    def leave(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Let rows leave; return pairs (place, row) of the rows that were moved into their places."""
        place = self._place
        remaining = self._place.rows - len(leaving)
        holes = [row for row in leaving if row < remaining]
        movers = sorted(set(range(remaining, place.rows)) - set(leaving))
        moved = list(zip(holes, movers, strict=True))
        if moved:
            into, row = torch.tensor(moved, device=self._mask.device).T
            self._copy(into, row)
            for hole, mover in moved:
                place.starts[hole] = place.starts[mover]
        del place.starts[remaining:]
        place.rows, place.low = remaining, min(place.starts, default=place.at)
        return moved

    def _copy(self, into: slice | Tensor, source: Tensor) -> None:
        """Copy some rows over others."""
        used = slice(self._place.low, self._place.at)
        for block in self._blocks:
            for stored in block.tensors:
                stored[into, :, used] = stored[source, :, used]
        self._mask[into] = self._mask[source]

    def _make_room(self, rows: int, width: int) -> None:
        """Make room for this many rows, newcomers of `width` columns, and one column more."""
        place, (tall, wide) = self._place, self._mask.shape
        # Without rows nothing has to be kept: the columns begin again at the left.
        if not place.rows and rows <= tall and width < wide:
            place.low = place.at = width
            return
        if rows <= tall and width <= place.at < wide:
            return
        # Only columns in use are copied: what lies before the first text is given up.
        columns = max(place.at - place.low, width)
        tall = max(tall, rows, min(self._seats, 1 << (rows - 1).bit_length()))
        wide = max(LEAST_COLUMNS, columns + int(SPARE_COLUMNS * columns) + 1)
        old = slice(place.low, place.at)
        new = slice(columns - (place.at - place.low), columns)

        def widened(stored: Tensor) -> Tensor:
            # Zeros, since what is masked is multiplied by 0, and what memory holds may be no number.
            more = stored.new_zeros(tall, stored.shape[1], wide, stored.shape[3])
            more[: place.rows, :, new] = stored[: place.rows, :, old]
            return more

        for block in self._blocks:
            keys, values = block.tensors
            block.tensors = widened(keys), widened(values)
        mask = self._mask.new_zeros(tall, wide)
        mask[: place.rows, new] = self._mask[: place.rows, old]
        self._mask = mask
        place.starts = [start + columns - place.at for start in place.starts]
        place.low = new.start
        place.at = columns
