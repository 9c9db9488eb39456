# make demo | test | torture | mutate | check | matrix | docs | gpu | slurm | image | bench | bench-gpu | bench-gpus | bench-compare | kernels | wheel | clean. The first of them sets up .venv; nothing else is needed beforehand.

BIN := .venv/bin
# Three test files at a time, on two cores too: many tests wait for processes of their own.
# These processes, of which there are hundreds, begin sooner where bytecode is kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 3 --dist loadfile
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.12 python3.11 python3.13 python3; do \
	"$$name" -c '$(PROBE)' 2>/dev/null && { echo "$$name"; break; }; done)

.PHONY: demo test torture mutate check ruff mypy doctests figures guard site matrix docs gpu slurm image bench bench-gpu bench-gpus bench-compare kernels wheel clean

demo: .venv/installed
	@$(BIN)/python workflows/demo.py

test: .venv/installed
	@$(PYTEST) -m "not gpu and not slurm"

# Faults injected for hours: make torture COUNT=1000 SEED=7 JOBS=8 BUDGET=3600 (seconds)
torture: .venv/installed
	@$(BIN)/python -m tests.torture --count $(or $(COUNT),1000) $(if $(SEED),--seed $(SEED)) \
		--jobs $(or $(JOBS),1) $(if $(BUDGET),--budget $(BUDGET))

# One small mistake at a time, for a night: make mutate COUNT=300 SEED=7 JOBS=2 BUDGET=28800 (seconds)
mutate: .venv/installed
	@$(BIN)/python -m tests.mutation --count $(or $(COUNT),300) $(if $(SEED),--seed $(SEED)) \
		--jobs $(or $(JOBS),1) $(if $(BUDGET),--budget $(BUDGET))

check: .venv/installed
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target ruff mypy doctests figures guard site

ruff: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: .venv/installed
	$(BIN)/mypy

doctests: .venv/installed
	$(BIN)/pytest -q --doctest-modules spdist

figures: .venv/installed
	$(BIN)/python docs/measured.py --check
	$(BIN)/python docs/papers.py --check
	$(BIN)/python benchmarks/suites.py check

guard: .venv/installed
	$(BIN)/python benchmarks/guard.py

site: .venv/installed
	@if [ -e .venv/docs-installed ]; then $(MAKE) --no-print-directory docs; \
		else echo "site: not built, for Sphinx is not installed: make docs installs it"; fi

# The suite in other environments, each in a .venv-NAME of its own: make matrix, or make matrix-lowest
matrix: matrix-3.11 matrix-3.13 matrix-lowest matrix-bare

matrix-3.11 matrix-3.13: matrix-%:
	@python$* -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@$(MAKE) --no-print-directory test BIN=.venv-$*/bin

matrix-lowest:
	@python3.11 -m venv .venv-lowest
	@python3.11 tests/lowest_versions.py > .venv-lowest/constraints.txt
	@.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint .venv-lowest/constraints.txt --editable ".[dev]"
	@$(MAKE) --no-print-directory test BIN=.venv-lowest/bin

# Without extras there are no tests: the demo and the commands must do without them
matrix-bare: .venv/installed
	@$(BIN)/python -m venv .venv-bare
	@.venv-bare/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@.venv-bare/bin/python workflows/demo.py
	@.venv-bare/bin/spdist info --machine

docs: .venv/docs-installed
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "open build/docs/index.html"

gpu: .venv/installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,cu13]"
	@$(BIN)/pytest -m gpu

slurm: .venv/installed  # on a machine that reaches SLURM; ON="words in front of its commands"
	@SPDIST_SLURM='$(ON)' $(BIN)/pytest -m slurm tests/deploy/test_slurm.py

image:  # the container's steps without Docker, as root, with debootstrap; WITH="--mirror ... --bind ..."
	@python3 deploy/try_image.py build/image $(WITH)

# Records of one commit: of two cores (PART=1 or 2), of one GPU (PART=1 to 8, each below ten minutes), of two GPUs
bench bench-gpu bench-gpus: .venv/bench-installed
	@$(BIN)/python benchmarks/suites.py $(subst bench,cores,$(@:bench-%=%)) $(if $(PART),--part $(PART)) $(if $(REAL),--real $(REAL))

bench-compare: .venv/installed
	@$(BIN)/python benchmarks/compare.py $(OLD) $(NEW)

# GPU kernels compiled ahead, without a GPU: make kernels ARCHITECTURES="sm_90"; the wheel holds those that are there
kernels: .venv/installed
	$(BIN)/python -m spdist.kernels.shipped.build $(ARCHITECTURES)

wheel: kernels
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output build dist docs/api/generated *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "spdist needs Python 3.11 or newer with the venv module; put it on PATH," \
		"or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[dev]"
	@# its files alone: the resources of Dask's operator, by which tests/deploy judges deploy/kubernetes
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps "dask-kubernetes>=2026.3"
	@touch $@

.venv/bench-installed: .venv/installed
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[bench]"
	@touch $@

.venv/docs-installed: .venv/installed
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@
