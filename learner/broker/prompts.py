"""The order of prompts: a fresh permutation per epoch, a function of the run's seed alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefixrl.common.messages import Prompt
from prefixrl.common.seeds import derive


class PromptOrder:
    """Place p is position p mod N of the permutation of epoch p // N; a place never changes, so a restart needs no cursor."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, epochs: int | None) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epochs = epochs
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def places(self) -> int | None:
        """Number of places, None when the order repeats for ever."""
        return None if self._epochs is None else self._epochs * len(self._prompts)

    def prompt(self, place: int) -> Prompt:
        """The problem at a place."""
        epoch, position = divmod(place, len(self._prompts))
        if epoch not in self._permutations:
            generator = np.random.Generator(np.random.PCG64(derive(self._seed, "epoch", epoch)))
            self._permutations[epoch] = generator.permutation(len(self._prompts))
        return self._prompts[int(self._permutations[epoch][position])]

    def identity(self, place: int) -> str:
        """Prompt id at a place."""
        return self.prompt(place).prompt_id
