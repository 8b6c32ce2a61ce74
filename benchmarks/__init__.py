"""One file per claim: `python -m benchmarks.NAME [--quick] --json FILE`, from the root of the repository."""
