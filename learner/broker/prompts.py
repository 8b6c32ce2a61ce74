"""The order of prompts: a fresh permutation per epoch, a function of the run's seed alone. Pure.

Without weights an epoch is every problem once. With weights it has as many places, and every source has its share of them: a
source that is small for its weight is gone through several times within it, a large one goes on in the next epoch where it
stopped.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.messages import Prompt
from prefixrl.common.seeds import derive


class PromptOrder:
    """Place p is position p mod N of the permutation of epoch p // N; a place never changes, so a restart needs no cursor."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        epochs: int | None,
        mixture: "Mixture | None" = None,
    ) -> None:
        """`mixture`: of the sources that `prompts` holds one after the other; None where every prompt counts the same."""
        self._prompts = prompts
        self._seed = seed
        self._epochs = epochs
        self._mixture = mixture
        self._permutations: dict[tuple[int, int, str], NDArray[np.int64]] = {}

    @property
    def places(self) -> int | None:
        """Number of places, None when the order repeats for ever."""
        return None if self._epochs is None else self._epochs * len(self._prompts)

    def prompt(self, place: int) -> Prompt:
        """The problem at a place."""
        epoch, position = divmod(place, len(self._prompts))
        drawn = int(self._permutation("epoch", epoch, len(self._prompts))[position])
        if self._mixture is None:
            return self._prompts[drawn]
        return self._prompts[self._mixed(epoch, drawn)]

    def identity(self, place: int) -> str:
        """Prompt id at a place."""
        return self.prompt(place).prompt_id

    def _mixed(self, epoch: int, drawn: int) -> int:
        """Index of a prompt: of an epoch's N places the first ones are the first source's, and so on."""
        assert self._mixture is not None
        source, place = self._mixture.locate(epoch, drawn)
        size = self._mixture.sizes[source]
        turn, position = divmod(place, size)
        order = self._permutation(f"source {source}", turn, size)
        return sum(self._mixture.sizes[:source]) + int(order[position])

    def _permutation(self, of: str, turn: int, size: int) -> NDArray[np.int64]:
        key = (turn, size, of)
        if key not in self._permutations:
            generator = np.random.Generator(np.random.PCG64(derive(self._seed, of, turn)))
            self._permutations[key] = generator.permutation(size)
        return self._permutations[key]


class Mixture:
    """How many places of an epoch each source has: the same in every epoch, off its share by less than one place."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """`sizes`: problems per source; `weights`: in proportion to which each source gets places.

        Raises:
            ValueError: a weight is so small that its source gets no place.
        """
        assert len(sizes) == len(weights) and min(sizes) > 0 and min(weights) > 0
        self.sizes = tuple(sizes)
        ends = [round(end * sum(sizes) / sum(weights)) for end in accumulate(weights)]
        self.places = tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
        if 0 in self.places:
            raise ValueError(
                f"weights {list(weights)} leave a source none of the {sum(sizes)} places of an epoch (they get "
                f"{list(self.places)}); raise its weight, or leave it out"
            )

    def locate(self, epoch: int, drawn: int) -> tuple[int, int]:
        """The source of an epoch's place number `drawn`, and which of all places of that source it is."""
        for source, places in enumerate(self.places):
            if drawn < places:
                return source, epoch * places + drawn
            drawn -= places
        raise AssertionError("the places add up to an epoch")
