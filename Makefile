# Everything a newcomer or a developer runs. `make demo` and `make test` work on a machine with Python 3.11+, pip and make.
PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
SECONDS ?= 3600
RUNS ?= 10000

VENV := .venv
BIN := $(VENV)/bin
# Nothing is installed by pip alone: this holds every file against hashes.txt.
INSTALL := $(BIN)/python tools/install.py --editable
PINNED := pyproject.toml constraints.txt hashes.txt
# A stamp is newer than what it was installed from, so a second call installs nothing.
RUNTIME := $(VENV)/.stamp-runtime
DEV := $(VENV)/.stamp-dev
ALL := $(VENV)/.stamp-all

TESTING := OMP_NUM_THREADS=1
# Compiled modules are kept even where the environment forbids it: tests start penstock hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

SAY := printf '\n\033[1m== %s\033[0m\n'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all fuzz fuzz-files faults check lint house types contracts hashes messages format bench setup clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  PYTHON=python3.12        the Python to build .venv with (3.11 or newer)'
	@echo '  ARGS="-k floors --cov"   more arguments for pytest, the fuzz or the benchmark'

demo: $(RUNTIME) ## set up what is missing and generate text with the shipped model
	@$(SAY) 'a story from the shipped model'
	$(BIN)/penstock run "Once upon a time"
	@$(SAY) 'a fact hidden in 8,000 tokens of stories, and a question for it'
	$(BIN)/python tools/hide.py --tokens 8000 | $(BIN)/penstock run --chat --temperature 0 --verbose -

test: $(DEV) ## set up what is missing and run every test
	@$(SAY) 'tests ($(WORKERS) workers, one thread each; GPU tests are skipped without a GPU)'
	$(TESTING) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(ALL) ## install a browser, node packages, Ray and schemathesis too, and run every test; a tool that is missing fails
	@$(SAY) 'tests ($(WORKERS) workers; none is skipped for want of a tool)'
	$(TESTING) PENSTOCK_ALL_TOOLS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

fuzz: $(DEV) ## compare random small models with transformers for SECONDS (an hour)
	@$(SAY) 'random models, against transformers ($(SECONDS) seconds)'
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_transformers.py --ranks --seconds $(SECONDS) $(ARGS)

fuzz-files: $(DEV) ## change files of models and caches at random, RUNS of each kind (10,000)
	@$(SAY) 'changed files ($(RUNS) of each kind)'
	$(INSTALL) fuzz
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_files.py --runs $(RUNS) $(ARGS)

faults: $(DEV) ## plant faults in copies of the project, and see that tests find them
	@$(SAY) 'planted faults ($(WORKERS) at a time)'
	$(BIN)/python tools/planted_faults.py --jobs $(WORKERS) $(ARGS)

check: lint house types contracts hashes ## style, limits, types, who may import whom, and whether every version has its hashes

lint: $(DEV)
	@$(SAY) 'style'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

house: $(DEV)
	@$(SAY) 'limits of complexity, parameters, lengths, names and docstrings'
	$(BIN)/python tools/house.py

types: $(DEV)
	@$(SAY) 'types'
	$(BIN)/mypy

contracts: $(DEV)
	@$(SAY) 'import contracts'
	$(BIN)/lint-imports --no-logo

hashes: $(DEV)
	@$(SAY) 'hashes of what constraints.txt names'
	$(BIN)/python tools/hashes.py

messages: $(DEV) ## print every message of the program in one list
	@$(BIN)/python tools/messages.py $(ARGS)

format: $(DEV) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(RUNTIME) ## measure the shipped model on this machine
	$(BIN)/penstock bench $(ARGS)

setup: $(DEV) ## install everything a developer needs into .venv

clean: ## delete .venv and everything that tools left behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship Python without ensurepip; there the pip beside it fills the environment.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo 'penstock needs Python 3.11 or newer, but there is no "$(PYTHON)"; try: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else "penstock needs Python 3.11 or newer, but $(PYTHON) is %d.%d; try: make PYTHON=python3.12 ..." % v)'
	@$(SAY) 'a virtual environment in $(VENV)'
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) tools/install.py --pip $(BIN)/python; fi || { rm -rf $(VENV); exit 1; }

$(RUNTIME): $(PINNED) | $(BIN)/python
	@$(SAY) 'penstock, its server and what they run on; torch is the largest download'
	$(INSTALL) serve grammar
	@touch $@

$(ALL): $(DEV) tools/test_tools.sh $(wildcard tools/ai-sdk/*.json)
	@$(SAY) 'what the last tests need'
	$(INSTALL) dev ray schema-tests
	tools/test_tools.sh $(VENV)
	@touch $@

$(DEV): $(RUNTIME)
	@$(SAY) 'what the checks and tests need'
	$(INSTALL) dev
	@touch $@
