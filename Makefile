# One environment (.venv), made once. A stamp in it says what it was made from, so a second run installs nothing; a change of
# pyproject.toml, constraints.txt or the C++ sources makes it anew. The only network these targets use is pip's.

PYTHON        ?=
VENV          := .venv
BIN           := $(VENV)/bin
RUNTIME       := $(VENV)/.made-runtime
DEVELOPMENT   := $(VENV)/.made-development
INSTALL       := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
LIBRARY       := $(shell find ffi -type f 2>/dev/null)

# What `make demo` runs; each can be given on the command line: make demo TOKENS=32
MODEL         ?= echo-tiny
DOCUMENT      ?= examples/data/manual.txt
TOKENS        ?= 128
SAMPLING      ?= --temperature 0.6 --top-p 0.95 --seed 1
# Arguments for pytest: make test TESTS='tests/test_pool.py -k tie'
TESTS         ?=
# Test processes, a file in each: compiling is most of the time, keeps one core busy, and serves the tests of its file
WORKERS       ?= auto

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test lint claims bench-cpu figures bazel clean

help:  ## this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*  ## /\1|/p' Makefile | while IFS='|' read -r name text; do \
	  printf '  %-11s %s\n' "$$name" "$$text"; done

setup: $(RUNTIME)  ## make .venv with the package and its C++ library (Python >= 3.12; PYTHON=... to choose one)

setup-dev: $(DEVELOPMENT)  ## setup, and the tools for tests and lint

demo: $(RUNTIME)  ## continue a real document with a small trained model from an offloaded cache, and check every bit
	$(BIN)/echo-jax generate --model $(MODEL) --prompt-file $(DOCUMENT) --max-new-tokens $(TOKENS) $(SAMPLING) --check

test: lint  ## lint, then all tests (TESTS='tests/test_pool.py -k tie' for some)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

lint: $(DEVELOPMENT)  ## ruff, pyright and the import contracts
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

claims: $(RUNTIME)  ## one line per claim: value, bar, machine, date, and met / short / unmeasured
	@$(BIN)/python -m bench.claims

bench-cpu: $(RUNTIME)  ## measure the claims that a CPU can answer, and record the rows
	$(BIN)/python -m bench.cpu

figures: $(RUNTIME)  ## the ECHO paper's figures that a CPU can rebuild, and the table of docs/paper.md beside all recorded rows
	$(BIN)/python -m bench.paper measure
	$(BIN)/python -m bench.paper write

bazel:  ## build and smoke-test the BUILD targets, offline, where bazel is installed
	@if command -v bazel >/dev/null 2>&1; then bazel --batch test --noshow_progress --symlink_prefix=/ --test_output=errors //...; else \
	  echo "bazel: skipped, there is no bazel on PATH (Debian: apt-get install bazel-bootstrap)"; fi

clean:  ## remove what make made: .venv, builds and caches (never recorded rows)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build requirements and dependencies are resolved together, and the package is then built against them without isolation.
$(RUNTIME): pyproject.toml constraints.txt $(LIBRARY)
	@if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	  python=$$(tools/find_python $(PYTHON)) || exit 1; \
	  echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); fi
	@echo "installing the package and what it needs"
	@$(BIN)/python tools/requirements.py build runtime > $(VENV)/runtime.txt
	@$(INSTALL) -r $(VENV)/runtime.txt
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

# The CUDA plug-in comes without what it needs to run (gigabytes) and into a folder that only the compile tests look at.
$(DEVELOPMENT): $(RUNTIME)
	@echo "installing the tools for tests and lint"
	@$(BIN)/python tools/requirements.py dev > $(VENV)/development.txt
	@$(BIN)/python tools/requirements.py cuda13 > $(VENV)/cuda.txt
	@$(INSTALL) -r $(VENV)/development.txt
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/compile-only -r $(VENV)/cuda.txt || \
	  echo "no CUDA plug-in for this platform; the compile tests will be skipped"
	@touch $@
