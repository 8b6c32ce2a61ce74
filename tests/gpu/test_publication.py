"""A publication of 3 GB from a GPU: pinned copies beside pageable ones, and nothing of the next step in them."""

import time
from pathlib import Path

import pytest

from gpu.on_device import publication, write_report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]


def test_a_version_of_3_gb_is_copied_whole_while_the_device_goes_on(tmp_path: Path) -> None:
    started_s = time.monotonic()
    write_report("publication", publication("cuda", 3 * 2**30, tmp_path), started_s)
