"""The order of prompts: a permutation per epoch, a function of the run's seed. Pure.

With weights every source has its share of an epoch: a small one is repeated, a large one goes on in the next epoch.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.seeds import derive
from prefixrl.common.wire.messages.groups import Prompt

PERMUTATIONS_KEPT, PLACES_KEPT = 256, 2**20
"""Limits of the cache of permutations: their number, and their places in all. It holds at least four epochs, because
live groups span two or three (more if there are few problems). Any other permutation is made again."""


class PromptOrder:
    """Prompts by `prompt_index`: i is position i mod N of the permutation of epoch i // N."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        epochs: int | None,
        mixture: "Mixture | None" = None,
    ) -> None:
        """`mixture`: weights of the sources that `prompts` holds in turn; None if all problems count the same."""
        self._prompts = prompts
        self._seed = seed
        self._epochs = epochs
        self._mixture = mixture
        self._permutations: dict[tuple[int, int, str], NDArray[np.int64]] = {}

    @property
    def total(self) -> int | None:
        """Number of indices, None where the order repeats for ever."""
        return None if self._epochs is None else self._epochs * len(self._prompts)

    def prompt(self, prompt_index: int) -> Prompt:
        """Return the problem of an index."""
        return self._prompts[self.problem(prompt_index)]

    def problem(self, prompt_index: int) -> int:
        """Return the number of the problem of an index, among all problems."""
        epoch, position = divmod(prompt_index, len(self._prompts))
        index = int(self._permutation("epoch", epoch, len(self._prompts))[position])
        if self._mixture is not None:
            source, number = self._mixture.locate(epoch, index)
            size = self._mixture.sizes[source]
            turn, position = divmod(number, size)
            order = self._permutation(f"source {source}", turn, size)
            index = sum(self._mixture.sizes[:source]) + int(order[position])
        return index

    def source(self, prompt_index: int) -> str:
        """Return the name under which figures list an index."""
        return self.prompt(prompt_index).source

    def is_ready(self, prompt_index: int) -> bool:
        """Return True: a group of any prompt may begin."""
        return True

    def _permutation(self, of: str, turn: int, size: int) -> NDArray[np.int64]:
        key = (turn, size, of)
        if key not in self._permutations:
            cache, most = self._permutations, max(PLACES_KEPT, 4 * 2 * len(self._prompts))
            while len(cache) >= PERMUTATIONS_KEPT or sum(map(len, cache.values())) + size > most:
                del cache[next(iter(cache))]
            generator = np.random.Generator(np.random.PCG64(derive(self._seed, of, turn)))
            self._permutations[key] = generator.permutation(size)
        return self._permutations[key]


class Mixture:
    """Prompts of an epoch per source: off the source's share by less than one."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """Take problems and weight per source; raise ValueError where one gets no prompt."""
        assert len(sizes) == len(weights) and min(sizes) > 0 and min(weights) > 0
        self.sizes = tuple(sizes)
        ends = [round(end * sum(sizes) / sum(weights)) for end in accumulate(weights)]
        self.counts = tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
        if 0 in self.counts:
            raise ValueError(
                f"weights {list(weights)} leave a source none of the {sum(sizes)} prompts of an epoch (they get "
                f"{list(self.counts)}); raise its weight, or leave it out"
            )

    def locate(self, epoch: int, drawn: int) -> tuple[int, int]:
        """Return the source of a number of an epoch, and its number among all of that source."""
        source = 0
        while drawn >= self.counts[source]:
            drawn -= self.counts[source]
            source += 1
        return source, epoch * self.counts[source] + drawn
