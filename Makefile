# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)-oldest
# The oldest that pyproject.toml allows.
OLDEST_TORCH := $(shell sed -n 's/^    "torch>=\(.*\)",$$/\1/p' pyproject.toml)
# Files of tests that run at a time: one more than there are cores, since many wait. With 0 one by one.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest
BESIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start many Pythons, and without byte code each of them compiles the source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-engines test-slow test-oldest test-gpu check docs benchmark clean

quickstart: $(VENV)/.run  ## virtual environment, install, train on real digits
	$(BIN)/ddprun pipelines/quickstart.yaml

test: check  ## linters, types, and the tests: with one real run on Slurm, Docker and Kubeflow each
	scripts/test-packages
	$(PYTEST) $(BESIDE) -m "not slow and not engines and not alone"
	$(PYTEST) -m "alone and not slow and not engines"

test-engines: $(VENV)/.dev  ## all other tests on Slurm and Docker
	scripts/test-packages
	$(PYTEST) -m "engines and not slow"

test-slow: $(VENV)/.dev  ## soaks and large matrices, and the oldest torch
	scripts/test-packages
	$(PYTEST) -m slow
	$(MAKE) test-oldest

test-oldest: $(OLDEST)/.dev  ## engine, hooks, observe and telemetry with the oldest torch that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest $(BESIDE) -m "not slow and not alone" tests/engine tests/hooks tests/observer tests/telemetry
	$(OLDEST)/bin/python -m pytest -m "alone and not slow" tests/engine tests/hooks tests/observer tests/telemetry

test-gpu:  ## what needs an NVIDIA GPU: with .venv or, without one, PYTHON and what it has; at most 10 minutes
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu

check: $(VENV)/.dev  ## what can be said without running anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

docs: $(VENV)/.dev  ## the site of docs/, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

benchmark: $(VENV)/.dev  ## tables of docs/performance.md: all, or ONLY="hooks memory"; QUICK=1 tries them
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(ONLY)

$(VENV)/bin/python $(OLDEST)/bin/python: %/bin/python:
	$(PYTHON) -m venv $*

$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@# What is imported is compiled then; all of it would take half a minute.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.run

$(OLDEST)/.dev: $(OLDEST)/bin/python pyproject.toml constraints.txt
	@# An older torch brings its own Triton, whose interpreter fails with NumPy 2.4.
	sed 's/^torch==.*/torch==$(OLDEST_TORCH).*/; s/^numpy==.*/numpy<2.4/; /^triton==/d' constraints.txt >$(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
