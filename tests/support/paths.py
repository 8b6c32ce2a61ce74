"""Paths of the repository and its examples."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
EXAMPLE = EXAMPLES / "arithmetic"
