"""What every section of the run file is made of: strict, frozen, no unknown keys, and numbers with their bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]

FROM_RUN_FILE = {"is_run_file": True}
"""Validation context of a user's run file: keys without effect are refused there even at their default values. A resolved
config, which names every key, is validated without it."""


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True
    )

    def is_given(self, key: str, is_run_file: bool) -> bool:
        """Whether the user set a key. Of a resolved config, which names every key, only that it is not at its default."""
        if is_run_file:
            return key in self.model_fields_set
        return bool(getattr(self, key) != type(self).model_fields[key].get_default())
