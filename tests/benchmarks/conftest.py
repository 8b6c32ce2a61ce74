"""`benchmarks` lies beside the packages and is not installed: it is found by its path, so that the root stays off sys.path."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"

spec = importlib.util.spec_from_file_location(
    "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
)
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["benchmarks"] = module
spec.loader.exec_module(module)
