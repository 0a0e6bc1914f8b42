# Two commands do everything on a machine that has Python 3.11+ and make:
#   make demo    install, then show the library at work on real data
#   make test    install, then run every check that CI runs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help install demo test lint types contracts unit format bench clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "ttapca needs Python 3.11 or later; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/ttapca demo

test: lint types contracts unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest --cov --cov-report=term

#   make format  rewrite the code in the house style
format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

#   make bench   measure what benchmarks/ has no result of, and write its README (an hour at most)
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

#   make clean   remove the virtual environment and all caches
clean:
	rm -rf $(VENV) .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
