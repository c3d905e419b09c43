# `make setup` builds .venv at the pinned versions; every other target does so first, and costs nothing when it is current.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.expertmesh-installed
# Tests are rewritten for their assertions, seconds in each process, and started again and again: keep what was compiled.
export PYTHONDONTWRITEBYTECODE =

# What `make test-oldest` runs. Left out is what later transformers alone have: norms behind experts, Inkling 2,
# dates in templates, a sandbox that refuses namespace(__class__=1), its words about a tokenizer's code, reasoning under
# the name that a template asks for, NVFP4 as today's compressed-tensors reads it.
OLDEST := tests/config tests/data tests/experts tests/weights tests/checkpoint tests/parallel/test_parity.py \
	tests/parallel/test_pipeline.py tests/simulation/test_simulate.py tests/test_gpu.py -m "not slow" \
	--ignore tests/experts/test_post_norm.py \
	--deselect "tests/data/test_conversations.py::test_a_token_that_ends_calls_and_results_that_name_the_call[True]" \
	--deselect "tests/weights/test_encoding.py::test_a_model_converted_to_a_format_is_read_alike_by_transformers_and_here[nvfp4]" \
	--deselect "tests/checkpoint/test_export.py::test_it_is_so_for_other_shardings_layouts_of_files_and_rules_that_compute[computed]" \
	--deselect "tests/data/test_hostile_templates.py::test_hostile_templates_are_refused_by_name_and_in_time[{{ namespace(__class__=1) }}]" \
	--deselect tests/data/test_hostile_templates.py::test_text_is_what_transformers_renders_character_for_character \
	--deselect tests/data/test_tokenizer.py::test_code_of_a_model_does_not_run_unless_trusted

# What one GPU has to tell, in about six minutes; the same correctness as tests is `pytest -m gpu`.
gpu:
	PYTHONPATH=src:.:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu $(ARGS)

.PHONY: setup test test-all test-every test-oldest test-newest gpu families lint demo figures schema docs wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/ci.txt
	@$(PYTHON) -c 'import sys; sys.exit("expertmesh needs Python 3.11 or newer; use make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e ".[dev,tensorboard,report,trl]"
	@touch $@

# Of pages of 2 MB a process has a short table, and each rank that is forked copies it; where the kernel has none, no change.
test test-every test-oldest test-newest: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# Two files at a time: half of the tests are one process, which leaves a core idle.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# Also what `slow` marks leave out of `make test`, of a test with many such cases another quarter at each commit,
# with Triton (300 MB) for its interpreter and compiler.
test-all: CASES = --quarter
test-all: test-every

# Every case, as the nightly job has it.
test-every: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e ".[kernels]"
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=40 $(CASES)

# The lowest versions that pyproject.toml claims, and the newest releases whatever it claims, each in its own environment.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet -c constraints/oldest.txt -e ".[dev]"
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile $(OLDEST)

test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade -e ".[dev,tensorboard,report,trl]"
	.venv-newest/bin/python -m pip install --quiet --upgrade torch transformers
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

# Every Mixture-of-Experts family of the installed transformers; rewrites docs/models.md. About half an hour on two cores.
families: export OMP_NUM_THREADS ?= 1
families: setup
	$(BIN)/python -m tests.families

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/limits.py

demo: setup
	$(BIN)/expertmesh demo $(ARGS)

# The configuration's schema, and the tables of docs/ that come from the code.
schema: setup
	$(BIN)/expertmesh schema > schema/expertmesh.schema.json
	$(BIN)/python docs/tables.py

# The picture of the README, from benchmarks/data.
figures: setup
	$(BIN)/python -m benchmarks.figures

# The site in build/site, from an environment of its own; fails for a link that leads nowhere or a page left out.
docs:
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-docs/bin/python -m pip install --quiet -c constraints/ci.txt -c constraints/docs.txt --group docs
	.venv-docs/bin/python -m pip install --quiet --no-deps -e .
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

# The wheel in dist, and that it holds what an installation needs beside the code.
wheel:
	rm -rf dist build/lib
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m zipfile -l dist/expertmesh-*.whl | awk '{print $$1}' > dist/contents.txt
	for file in expertmesh/py.typed expertmesh/planning/hardware.yaml \
		share/expertmesh/schema/expertmesh.schema.json $(addprefix share/expertmesh/,$(wildcard examples/*.*)); do \
		grep -q "$$file$$" dist/contents.txt || { echo "the wheel lacks $$file"; exit 1; }; done

clean:
	rm -rf .venv .venv-docs .venv-oldest .venv-newest build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
