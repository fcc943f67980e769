# Development tasks, with one target each. Run `make` without a target to list them.
#
#   PYTHON        the interpreter for .venv (default: the first of those below with 3.11 or newer)
#   TORCH_INDEX   an extra package index for a CPU or CUDA build of torch (docs/how-to/install.md)

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(python) -c '$(SUPPORTED)' 2>/dev/null && echo $(python))))
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
# Python compiles a module when it is first imported. Compiling all modules now would take longer than the rest of the installation.
PIP_INSTALL = -m pip install --disable-pip-version-check --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Two processes run the tests. All tests on real ranks run in one of them, one after another, and so do the cells of a lesson.
TWO_AT_A_TIME := --numprocesses 2 --dist loadgroup

# Ignore packages that are installed outside .venv.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME
# Keep compiled files; otherwise, each process that a test starts would compile ringsim again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-quick test-long test-gpu test-lowest dist check check-format check-lint check-types check-spelling lab site figures soak clean clean-all

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## create .venv with ringsim and its pinned dependencies (other targets do this if necessary)

demo: $(INSTALLED) ## train a small transformer on four real ranks, save the trace and draw both pictures
	$(BIN)/ringsim demo

test: $(INSTALLED) ## run the tests, in two processes
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

test-quick: $(INSTALLED) ## run the tests that start no ranks
	$(BIN)/python -m pytest -m "not distributed and not notebooks" $(TWO_AT_A_TIME)

test-long: $(INSTALLED) ## run the long tests that `make test` leaves out
	$(BIN)/python -m pytest -m long $(TWO_AT_A_TIME)

test-gpu: $(INSTALLED) ## run the tests that need a GPU, and list those that need more than this machine has
	$(BIN)/python -m pytest -m gpu tests/distributed/test_gpu.py

test-lowest: ## run the quick tests with the lowest supported versions (in .venv-lowest)
	$(if $(PYTHON),,$(error ringsim needs Python 3.11 or newer, but none was found. Run: make test-lowest PYTHON=/path/to/python3.11))
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) --constraint requirements/lowest.txt --editable '.[mpi,greenlets,hf,test]'
	.venv-lowest/bin/python -m pytest -m "not distributed and not notebooks" $(TWO_AT_A_TIME)

check: check-format check-lint check-types check-spelling ## check format, lint, types and spelling, like pre-commit and CI

check-format: $(INSTALLED)
	$(BIN)/ruff format --check

check-lint: $(INSTALLED)
	$(BIN)/ruff check

check-types: $(INSTALLED)
	$(BIN)/mypy

check-spelling: $(INSTALLED)
	$(BIN)/codespell

dist: ## build the wheel and sdist of the last commit twice, compare them and check them (in .venv-dist)
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(PIP_INSTALL) build twine
	rm -rf dist build/again
	sh requirements/build.sh dist && sh requirements/build.sh build/again && diff -r dist build/again
	.venv-dist/bin/twine check --strict dist/*

lab: $(INSTALLED) ## open the lessons in JupyterLab
	$(BIN)/jupyter lab notebooks

site: $(INSTALLED) ## build the site in build/site, with docs, lessons, reference and gallery (5 minutes)
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt --no-build-isolation --editable '.[site]'
	$(BIN)/python -m sphinx -W --keep-going -b html -c site . build/site

figures: $(INSTALLED) ## redraw the pictures for README.md and docs/ from the committed traces
	$(BIN)/python figures/make.py

soak: $(INSTALLED) ## search for leaks, for files that ringsim cannot handle and for false alarms (takes hours)
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

clean-all: clean ## also remove the environments
	rm -rf $(VENV) .venv-lowest .venv-dist

# This rule runs again if either of the two files changes. Build tools come first, so pip need not download them. torch is by far the largest package.
$(INSTALLED): pyproject.toml requirements/lock.txt
	$(if $(PYTHON),,$(error ringsim needs Python 3.11 or newer, but none was found. Run: make PYTHON=/path/to/python3.11))
	@$(PYTHON) -c '$(SUPPORTED)' || { echo 'ringsim needs Python 3.11 or newer, got:' >&2; $(PYTHON) --version >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt setuptools
	$(BIN)/python $(PIP_INSTALL) --constraint requirements/lock.txt --no-build-isolation --editable '.[lab,mpi,greenlets,hf,test,browser,dev]'
	@touch $@
