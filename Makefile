# One environment, .venv, serves every target. It is made on first use and left
# alone until pyproject.toml or constraints.txt changes.
#
#   PYTHON=...  the interpreter to make it with (3.11 or later)
#   VENV=...    where it is, if not in .venv
#   TESTS=...   what make test runs: make test TESTS="tests/core tests/cli"
#   ARGS=...    passed on: make test ARGS="-k policy", make demo ARGS="--compare reference,flagos"
#   JOBS=...    test processes (2)

PYTHON ?=
VENV   ?= .venv
JOBS   ?= 2
TESTS  ?=
ARGS   ?=

BIN    := $(VENV)/bin
EXTRAS := test,cuda,plot
MINIMUM := 3, 11

# The stamp's name holds a digest of what was installed and of where the tree
# stands, so a change of branch that changes neither installs nothing.
DIGEST := $(shell { cat pyproject.toml constraints.txt; pwd; echo '$(EXTRAS)'; } | cksum | cut -d' ' -f1)
STAMP  := $(VENV)/.installed-$(DIGEST)

# With PYTHON given, an environment made with another version is made anew, and one that
# does not run is an error.
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
ifneq ($(PYTHON),)
WANTED := $(shell $(PYTHON) $(VERSION))
PRESENT := $(shell $(BIN)/python $(VERSION))
OTHER := $(if $(WANTED),$(filter-out $(PRESENT),$(WANTED)),$(PYTHON))
endif

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench docs clean FORCE

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## train a small transformer through the dispatcher (the main job)
	$(BIN)/te-fl demo $(ARGS)

# Triton decides when it is imported whether it interprets, hence two runs. Status 5 is
# pytest's word for a selection that selects nothing: right in one of them, not in both.
INTERPRETED := $(if $(TESTS),$(filter tests/flagos% tests/conformance%,$(TESTS)),tests/flagos tests/conformance/test_sets.py)
# Many tests start processes; none of them should compile the package anew, which is what
# PYTHONDONTWRITEBYTECODE, set in many containers, comes to.
test: $(STAMP)  ## run the whole test suite, or TESTS="tests/core" of it
	@$(BIN)/python -m compileall -q transformer_engine_fl; \
	first=0; second=5; \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS) $(ARGS) || first=$$?; \
	if [ -n "$(INTERPRETED)" ]; then \
	  TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(INTERPRETED) $(ARGS); second=$$?; \
	fi; \
	case "$$first $$second" in "0 0"|"0 5"|"5 0") ;; *) exit 1;; esac

check: $(STAMP)  ## ruff, ruff format and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict transformer_engine_fl

format: $(STAMP)  ## apply ruff's format and its safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure what a dispatch costs
	$(BIN)/python benchmarks/dispatch_overhead.py $(ARGS)

docs: $(STAMP)  ## write the pages of docs/operators from the contracts
	$(BIN)/python docs/generate.py

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With PYTHON given, that one or nothing; otherwise the first that is new enough.
define FIND_PYTHON
new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < ($(MINIMUM)))' >/dev/null 2>&1; }; \
python='$(PYTHON)'; \
if [ -n "$$python" ]; then \
  new_enough "$$python" || { \
    echo "PYTHON=$$python is not a Python 3.11 or later that runs here" >&2; exit 1; }; \
else \
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do \
    if new_enough "$$candidate"; then python=$$candidate; break; fi; \
  done; \
  [ -n "$$python" ] || { \
    echo "No Python 3.11 or later on the PATH (python3 is: $$(python3 --version 2>&1 || true))." >&2; \
    echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }; \
fi
endef

# An environment that lacks pip was interrupted while it was made: start over.
$(STAMP): $(if $(OTHER),FORCE)
	@$(FIND_PYTHON); \
	if [ -n '$(OTHER)' ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "Creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV) || { \
	    echo "$$python cannot make a virtual environment; on Debian and Ubuntu its package is python3-venv" >&2; \
	    exit 1; }; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-*
	@touch $@
