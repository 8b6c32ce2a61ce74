"""A process in which no file can be opened for a while."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Leave no descriptor free meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors[0] + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                descriptors.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in descriptors:
            os.close(descriptor)
