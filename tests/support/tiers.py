"""Cases of a parametrised test that run for every change, and those that run nightly."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_nightly(cases: Iterable[Any], each_change: int) -> list[Any]:
    """Return the cases; all but the first `each_change` are marked nightly."""
    return [
        case if place < each_change else pytest.param(case, marks=pytest.mark.nightly)
        for place, case in enumerate(cases)
    ]
