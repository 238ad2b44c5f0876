# Two commands: `make demo` runs the main job, `make test` runs everything that CI runs. Both set up what is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test lint unit sglang fuzz mutants harnesses patience chaos clean

help:
	@echo "make demo    set up and train a small real policy through a real harness, elastic cells on the CPU"
	@echo "make test    set up and run lint, types, import contract, unit tests and one shortened end-to-end run"
	@echo "make setup   only what demo and test set up: .venv, bubblewrap, two harnesses"
	@echo "make unit    only the tests that start no harness, no engine and no worker process"
	@echo "make patience   calls of ten minutes without a token through every installed harness (20 minutes)"
	@echo "make harnesses  install every harness and run all tests against the real binaries"
	@echo "make chaos   kills random processes of a real run for some minutes (ARGS='--kills 50 --seed 1')"
	@echo "make sglang  set up SGLang for the CPU and run the engine contract against it"
	@echo "make fuzz    14,000 hostile bodies at the proxy"
	@echo "make mutants single changes to the code, and whether the unit tests notice them (an hour)"

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh

demo: setup
	$(BIN)/gyre demo $(ARGS)

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/pytest

lint:
	$(BIN)/ruff check gyre tests examples benchmarks
	$(BIN)/ruff format --check gyre tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture gyre scripts/unused_allowed.py

# A worker begins with an equal part of the tests in order, so that it loads most of its tokenizers and models alone.
# Without bytecode, every worker and every process that a test starts would compile everything again.
unit: export PYTHONDONTWRITEBYTECODE =
unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not live and not harness and not e2e and not sglang"

# The engine contract against a real SGLang server on the CPU; 3.2 GB in .cache.
sglang: setup
	@PYTHON=$(PYTHON) scripts/sglang_cpu.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -m sglang tests/engines

# A call of ten minutes without a token, twice, through every installed harness at once: twenty minutes, little processor.
patience: setup
	GYRE_PATIENCE_S=600 $(BIN)/pytest -n 11 -rs tests/proxy/test_harness_patience.py

# Every harness that has a profile, each at its pinned version: 2 GB in .cache.
harnesses: setup
	$(BIN)/gyre setup all
	OMP_NUM_THREADS=1 $(BIN)/pytest -m harness -rs --durations=10

chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py examples/quickstart.toml $(ARGS)

fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/proxy/test_proxy_fuzz.py --hypothesis-profile=nightly

# Arguments: make mutants ARGS="--rooms control --count 40 --seed 3"
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py $(ARGS)

clean:
	rm -rf .venv .cache
