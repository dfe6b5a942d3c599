# Each target creates and reuses the project's own virtual environment, .venv.
# PYTHON: the interpreter that it is made from (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# tests run in as many processes as there are cores, one thread each; a file's tests share its expensive fixtures
test test-all: export OMP_NUM_THREADS := 1
PARALLEL := --numprocesses auto --dist loadfile

.PHONY: help demo test test-all check docs format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train, export and explain a small model on generated images (minutes, CPU is enough)"
	@echo "make test      the tests (about 6 minutes on 2 cores)"
	@echo "make test-all  the slow tests too, and those that ask the package index"
	@echo "make check     ruff, mypy, import-linter"
	@echo "make docs      the documentation as a site, links checked: build/site/index.html"

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch is large; a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[all-cpu,dev,docs]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/opal-deploy demo --out runs/demo --overwrite

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu and not network"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu"

check: $(INSTALLED)
	$(BIN)/ruff check . train export bench
	$(BIN)/ruff format --check . train export bench
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(BIN)/ruff check --fix . train export bench
	$(BIN)/ruff format . train export bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
