# make demo | test | check | gpu | bench | clean. The first of them sets up .venv; nothing else is needed beforehand.

BIN := .venv/bin
# Two files of tests at a time: those that weigh memory or kill workers have processes of their own.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.12 python3.11 python3.13 python3; do \
	"$$name" -c '$(PROBE)' 2>/dev/null && { echo "$$name"; break; }; done)

.PHONY: demo test check gpu bench clean

demo: .venv/installed
	@$(BIN)/python workflows/demo.py

test: .venv/installed
	@$(PYTEST) -m "not gpu"

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not gpu and not slow"
	$(BIN)/pytest --doctest-modules spdist

gpu: .venv/installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,cu13]"
	@$(BIN)/pytest -m gpu

bench: .venv/installed
	@for script in $$(grep -l __main__ benchmarks/*.py); do echo "$$script"; $(BIN)/python "$$script" || exit 1; done

clean:
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "spdist needs Python 3.11 or newer with the venv module; put it on PATH," \
		"or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@
