# The two commands a newcomer needs are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help install demo test check clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# Each stamp is remade when what it installs changed.
$(VENV)/.core: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing meshwright into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests and checks need ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,check]'
	@touch $@

install: $(VENV)/.core ## make .venv and install meshwright into it

demo: $(VENV)/.core ## train a small model on the standard library's text over 2 processes
	@$(BIN)/meshwright demo

test: $(VENV)/.dev ## run every test (CPU only, several processes)
	@$(BIN)/python -m pytest

check: $(VENV)/.dev ## formatting, lint, types and the floors' import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache

clean:           ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist src/*.egg-info
