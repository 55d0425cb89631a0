# Every target works on a fresh checkout: it first makes .venv, which needs Python 3.11 or newer.
# `make PYTHON=python3.12 test` takes another interpreter for a new .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The constraints pin torch to the build that CI tests, whatever the newest one is.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench docs clean

help:  ## show the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | sort | expand -t 8

demo: $(READY)  ## train on four shaped hosts, against torch DDP; writes demo.html
	$(BIN)/tonnage demo --html demo.html

test: lint types  ## every check that CI makes
	$(BIN)/pytest $(TESTS)

lint: $(READY)  ## style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)  ## mypy --strict on the package
	$(BIN)/mypy

bench: $(READY)  ## run every benchmark, one after another
	@for each in benchmarks/*.py; do echo "== $$each"; $(BIN)/python "$$each" || exit 1; done

docs: $(READY)  ## build the site into site/; any broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove .venv and whatever was built
	rm -rf $(VENV) site dist demo.html .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An interpreter that is gone leaves a dangling link, for which make runs this rule again.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: tonnage needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "error: no venv module here; on Debian: apt-get install python3-venv" >&2; exit 1; }

# Groups need pip 25.1, and Python 3.11 and 3.12 bring older ones. The stamp comes last: an install
# that was cut off is begun again.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing tonnage and its development tools into $(VENV) (minutes, the first time)" >&2
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) -e '.[train,huggingface,lightning,ray]' --group dev --group browser --group docs
	@touch $@
