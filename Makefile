# make serve    a prefill and a decode engine with the demo model, on this machine
# make test     what a machine without a GPU can run: of the exhaustive tests one slice (SLICE=2/12; else by commit)
# make test-fast    those of tests/unit and tests/sockets that do not take long, by slices too
# make test-exhaustive    all slices of `make test`
# make chaos    faults at random on three hosts made of namespaces, under load (root; SECONDS=600 SEED=1)
# make test-gpu what needs a CUDA device; `make test` runs there too, and then compiles the kernels that it interprets here
# make test-gpu OFFLINE=1    the same without a network: with the packages that the host's Python finds, installing none
# make lint     style, types, which package may import which, prose, names of classes; make format mends style
# make docs     the reference pages that follow from the code: commands, metrics, routes
# make wheel    a wheel in dist/
# make clean    takes away all of it, .venv included

PYTHON ?= python3
PORT ?= 8000
SECONDS ?= 600
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := cluster engine kernels kv_transfer

# A process a core, of which one starts the clusters, one after the other: see tests/conftest.py.
EVERY_CORE := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Which of the tests marked `exhaustive` run. As many commits in a row as there are slices run all of them.
SLICES := 12
SLICE ?= $(shell echo $$(( $$(git rev-list --count HEAD 2>/dev/null || echo 0) % $(SLICES) + 1 )))/$(SLICES)

# Several processes share few cores: one thread each, and no spinning while waiting.
export OMP_WAIT_POLICY ?= passive
export RAY_USAGE_STATS_ENABLED ?= 0
# Else every process of a test compiles what it imports anew, and each of pytest's all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve test test-fast test-exhaustive chaos test-gpu lint docs format wheel clean

help:
	@sed -n 's/^# make/make/p' Makefile

# The tests that need a CUDA device; a host may lack what others import.
GPU_TESTS = $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')

ifdef OFFLINE
$(VENV)/.dev: pyproject.toml tools/host_venv.py
	@$(PYTHON) tools/host_venv.py $(VENV)
	@touch $(VENV)/.serve $@
else
$(VENV)/bin/python:
	@[ "$$(uname -s)" = Linux ] || { echo "Baton needs Linux (this is $$(uname -s)): a virtual machine or a container will do"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Baton needs Python 3.11 or newer (PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The kernels are compiled here, so that no start has to wait for them.
$(VENV)/.serve: pyproject.toml $(VENV)/bin/python
	@echo "installing Baton into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m baton.kernels.native
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
endif

serve: $(VENV)/.serve
	@$(BIN)/baton serve configs/demo/model --model-id baton-demo --prefill 1 --decode 1 --port $(PORT) || [ $$? -eq 130 ]

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu and not chaos" --slice $(SLICE) $(EVERY_CORE)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit tests/sockets -m "not gpu and not slow" --slice $(SLICE) $(EVERY_CORE)

test-exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu and not chaos" $(EVERY_CORE)

chaos: $(VENV)/.dev
	@mkdir -p build
	$(BIN)/python -m tests.chaos.chaos --seconds $(SECONDS) --seed $(SEED) --json build/chaos.json

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu $(GPU_TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/namespace/baton
	@$(foreach folder,$(PACKAGES),ln -sfn $(CURDIR)/$(folder) build/namespace/baton/$(folder);)
	$(BIN)/mypy
	$(BIN)/mypy tools/*.py
	$(BIN)/lint-imports
	$(BIN)/python tools/prose.py

docs: $(VENV)/.dev
	$(BIN)/python tools/reference.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.serve
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
