# `make setup` builds .venv at the pinned versions; every other target does so first, and costs nothing when it is current.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.expertmesh-installed
# Tests fork many ranks on few cores; more threads than cores make them crawl.
export OMP_NUM_THREADS ?= 1

.PHONY: setup test families lint demo schema clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/ci.txt
	@$(PYTHON) -c 'import sys; sys.exit("expertmesh needs Python 3.11 or newer; use make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e ".[dev,tensorboard,report]"
	@touch $@

# Two files at a time: half of the tests are one process, which leaves a core idle.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Every Mixture-of-Experts family of the installed transformers; rewrites docs/models.md. About half an hour on two cores.
families: setup
	$(BIN)/python -m tests.families
	$(BIN)/python -m tests.families.known

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: setup
	$(BIN)/python -m expertmesh.demo

schema: setup
	$(BIN)/python -m expertmesh.config schema/expertmesh.schema.json

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
