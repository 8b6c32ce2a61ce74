"""Rows of data as files of lines of JSON."""

import json
from pathlib import Path
from typing import Any


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
