"""The first code of the interpreter in the sandbox: `python -c` with the text of this file; nothing imports it.

The source of the program comes first on stdin, after its length, so that no file is needed. The
rest of stdin is the program's input. The arguments are folders to import packages from.
"""

import builtins
import os
import sys


def read_source() -> str:
    """Prepare the interpreter, and return the source on stdin."""
    # Without `site` both are missing.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.setrecursionlimit(600_000)
    sys.path += sys.argv[1:]
    del sys.argv[1:]
    return os.read(0, int(os.read(0, 12))).decode()


if __name__ == "__main__":
    exec(compile(read_source(), "program.py", "exec"), {"__name__": "__main__"})
