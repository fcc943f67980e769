# What one does here, a target a job. `make` alone lists them.
#
#   PYTHON        the interpreter that .venv is made with (default: the first of those below that is 3.11 or newer)
#   TORCH_INDEX   one more package index, where pip finds a CPU-only or a CUDA build of torch (docs/how-to/install.md, "Choose a build of torch")

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(python) -c '$(SUPPORTED)' 2>/dev/null && echo $(python))))
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
PIP_INSTALL = -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Tests that start no ranks, and lessons, do not disturb each other; what belongs together (those on real ranks, a lesson's) stays in one process.
TWO_AT_A_TIME := --numprocesses 2 --dist loadgroup

# Only what is installed in .venv counts.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME
# Without files to keep what it has compiled, each process that a test starts would compile ringsim anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-quick test-long test-lowest dist check check-format check-lint check-types check-spelling lab site figures soak clean clean-all

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## make .venv and install ringsim and its pinned dependencies; every other target does it when needed

demo: $(INSTALLED) ## train a small transformer on four real ranks, save the trace, draw both pictures
	$(BIN)/ringsim demo

test: $(INSTALLED) ## run the tests: those on real ranks one after the other, and beside them the lessons and the quick ones
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

test-quick: $(INSTALLED) ## run the tests that start no ranks
	$(BIN)/python -m pytest -m "not distributed and not notebooks" $(TWO_AT_A_TIME)

test-long: $(INSTALLED) ## run what `make test` leaves out because it takes long, such as each row of docs/faults.md in fresh ranks
	$(BIN)/python -m pytest -m long $(TWO_AT_A_TIME)

test-lowest: ## run the quick tests with the lowest supported versions (another environment, .venv-lowest)
	$(if $(PYTHON),,$(error ringsim needs Python 3.11 or newer: make test-lowest PYTHON=/path/to/python3.11))
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) --constraint requirements/lowest.txt --editable '.[mpi,greenlets,hf,test]'
	.venv-lowest/bin/python -m pytest -m "not distributed and not notebooks" $(TWO_AT_A_TIME)

check: check-format check-lint check-types check-spelling ## format, lint, types, spelling: what pre-commit and CI run

check-format: $(INSTALLED)
	$(BIN)/ruff format --check

check-lint: $(INSTALLED)
	$(BIN)/ruff check

check-types: $(INSTALLED)
	$(BIN)/mypy

check-spelling: $(INSTALLED)
	$(BIN)/codespell

dist: ## build wheel and sdist of the last commit in dist/, twice, compare their bytes, and check them (another environment, .venv-dist)
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP_INSTALL) build twine
	rm -rf dist build/again
	sh requirements/build.sh dist && sh requirements/build.sh build/again && diff -r dist build/again
	.venv-dist/bin/twine check --strict dist/*

lab: $(INSTALLED) ## open the lessons in JupyterLab
	$(BIN)/jupyter lab notebooks

site: $(INSTALLED) ## build the site in build/site: the docs, the lessons run anew, the reference, a gallery; takes five minutes
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt --no-build-isolation --editable '.[site]'
	$(BIN)/python -m sphinx -W --keep-going -b html -c site . build/site

figures: $(INSTALLED) ## draw the pictures of README.md and docs/ again from the committed traces
	$(BIN)/python figures/make.py

soak: $(INSTALLED) ## look for what grows, for what breaks a reader of files and for false alarms, for hours: not part of the tests
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt --no-build-isolation --editable '.[soak]'
	$(BIN)/python -m pytest --hypothesis-profile soak -m "not distributed and not notebooks" --timeout 0 $(TWO_AT_A_TIME)
	$(BIN)/python -m pytest --hypothesis-profile soak -m soak
	$(BIN)/python benchmarks/soak_files.py
	$(BIN)/python benchmarks/soak_files.py --atheris
	$(BIN)/python benchmarks/soak_runs.py
	$(BIN)/python benchmarks/quiet_runs.py

clean: ## remove caches and build products
	rm -rf build dist site/_static *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache demo
	find ringsim tests figures benchmarks notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

clean-all: clean ## the same, and the environments
	rm -rf $(VENV) .venv-lowest .venv-dist

# Installing happens once for each change of the two files. What builds ringsim comes first, so that pip fetches nothing to build with. torch
# is by far the largest part.
$(INSTALLED): pyproject.toml requirements/lock.txt
	$(if $(PYTHON),,$(error ringsim needs Python 3.11 or newer, and found none: make PYTHON=/path/to/python3.11))
	@$(PYTHON) -c '$(SUPPORTED)' || { echo 'ringsim needs Python 3.11 or newer, got:' >&2; $(PYTHON) --version >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt setuptools
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt --no-build-isolation --editable '.[lab,mpi,greenlets,hf,test,browser,dev]'
	@touch $@
