# Three commands do everything on a machine that has Python 3.11+ and make:
#   make demo    install, then show the library at work on photographs, in two minutes
#   make serve   install, then show many cameras on a live page, some of which degrade; Ctrl-C ends it
#                (PORT=8001: another port; DATA=cifar10: our ResNet-20, once CIFAR-10 is there)
#   make test    install, then run every check that CI runs
# And for an afternoon:
#   make cifar10 the paper's tables on CIFAR-10, from data to report; run it again to continue
#                (QUICK=1: 1,000 images per corruption; MODEL=FILE: another network, with
#                OPTIONS="--normalise none" and the like)
#   make cifar100 MODEL=FILE    the same for CIFAR-100
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: help install demo serve cifar10 cifar100 test started test-quick test-elsewhere lowest newest pythons lint types contracts unit format bench docs release clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' || \
	    { echo "ttapca needs Python 3.11.4 or later; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/ttapca demo

serve: $(STAMP)
	@$(BIN)/python scripts/serve_demo.py $(if $(PORT),--port $(PORT)) $(if $(DATA),--data $(DATA))

cifar10 cifar100: $(STAMP)
	$(BIN)/ttapca reproduce $@ $(MODEL) $(if $(QUICK),--quick) $(OPTIONS)

test: started lint types contracts docs unit

started:
	@echo "All checks take some nine minutes on two quiet cores, seven of them the tests; make test-quick takes one."

#   make test-quick  lint, and the quick tests of the mathematics and of the methods, for the inner loop
test-quick: $(STAMP) lint
	$(BIN)/pytest -q -m 'not slow' --numprocesses auto --maxprocesses 4 --dist loadfile \
	    tests/spectral tests/support tests/engines tests/test_golden.py tests/test_walks.py tests/test_names.py tests/methods/test_methods.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest --cov --cov-report=term --numprocesses auto --maxprocesses 4 --dist loadfile

#   make docs    build the documentation into site/, and run its tutorials; warnings are errors
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

#   make test-elsewhere  the tests as on other machines: processors, users, locales, in the background
test-elsewhere:
	scripts/test_elsewhere.sh

#   make lowest  the quick tests with the oldest versions that pyproject.toml allows (torch as pinned)
#   make newest  the quick tests with the newest versions (torch as pinned)
#   make pythons the quick tests with the pinned versions, on each Python 3.11+ of this machine
lowest newest pythons:
	PYTHON=$(PYTHON) scripts/test_versions.sh $@

#   make release build wheel and sdist, and try the wheel in a clean environment (RELEASING.md)
release: $(STAMP)
	PYTHON=$(PYTHON) scripts/check_release.sh

#   make format  rewrite the code in the house style
format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

#   make bench   measure what benchmarks/ has no result of, and write its README (an hour at most)
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

#   make clean   remove the virtual environments, what was built, and all caches
clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-release $(VENV)-3.* dist site .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
