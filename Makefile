# Everything a clone needs: `make demo` and `make test`. Each target installs what it uses.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
# The version line in pyproject.toml is the bound; this is the build that is tested.
TORCH  := torch==2.13.0
# Without an NVIDIA driver the CPU build (200 MB) is preferred to the CUDA one (several GB).
CPU_INDEX := https://download.pytorch.org/whl/cpu

# One thread per process: the tests run several workers on a small machine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-gpu lint types proto proto-check clean

help:
	@echo "make demo        serve real requests through prefill and decode workers, show what moved"
	@echo "make test        all tests that are not slow, gpu or peer"
	@echo "make test-slow   the slow ones"
	@echo "make test-gpu    the ones that need a CUDA device"
	@echo "make lint types  ruff and mypy (strict)"
	@echo "make proto       regenerate disagg/wire/v1 from proto/"
	@echo "make clean       remove the environment and every cache"
	@echo "PYTHON=python3.12 make ... chooses the interpreter (3.11 or newer)"

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "disagg needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Choose another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating .venv with $$($(PYTHON) -V)"; $(PYTHON) -m venv .venv; }
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  echo "installing $(TORCH), CUDA build (this takes minutes)"; \
	  $(BIN)/python -m pip install -q $(TORCH); \
	else \
	  echo "installing $(TORCH), CPU build"; \
	  $(BIN)/python -m pip install -q --no-deps --retries 1 --extra-index-url $(CPU_INDEX) $(TORCH); \
	fi
	@echo "installing disagg and what it depends on (a few minutes)"
	@$(BIN)/python -m pip install -q -e '.[test,dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu and not peer" --hypothesis-profile ci

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not peer"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m "gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

proto:
	PYTHON=$(PYTHON) sh proto/generate.sh

proto-check:
	PYTHON=$(PYTHON) sh proto/generate.sh --check

# Literal names only: a variable could be set to anything from outside.
clean:
	rm -rf .venv .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
