"""A user who is not root, for programs that must be as harmless there."""

from collections.abc import Callable

import pytest

from benchmarks.ordinary_user import run_as_ordinary_user


@pytest.fixture(scope="session")
def as_ordinary_user() -> Callable[[str], str]:
    """Runs Python code as a user who is not root; its output. Root's own Python may be where nobody else can read."""

    def run_code(code: str) -> str:
        shown = run_as_ordinary_user(code)
        assert shown is not None
        return shown

    if run_as_ordinary_user("") is None:
        pytest.skip("an ordinary user can run no Python here that has the packages")
    return run_code
