"""The last words of a process: an error as one printable message, and its exit code. A light import."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prefixrl.common.errors import PrefixRLError, UserError, is_full

_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HIDDEN = (*range(32), *range(127, 160), 0x2028, 0x2029, *_DIRECTIONS)
_ESCAPES = {code: f"\\u{code:04x}" for code in _HIDDEN if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return a text of a peer or model for a terminal or log: control characters as in JSON."""
    return text.translate(_ESCAPES)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn a PrefixRLError into one message and its exit code; others keep their stack trace."""
    try:
        yield
    except PrefixRLError as error:
        words = f"error: {error}" if error.is_fault else str(error)
        code = error.exit_code
    except OSError as error:
        code = UserError.exit_code
        if is_full(error):
            words = f"error: the disk is full: {error}; make room there and start again"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
            place = f"error: {error.filename} may not be written or read: {error.strerror}"
            words = f"{place}; choose another place, or allow it"
        else:
            raise
    else:
        return
    sys.stderr.write(printable(f"{words}\n"))
    sys.stderr.flush()
    raise SystemExit(code)
