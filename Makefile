# `make demo` and `make test` need make and a Python >= 3.10 with venv; everything else they install into VENV.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
THREADS ?= 2

BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) --editable
# pip would compile in one process. Some packages hold files that are no Python 3.
COMPILE := $(BIN)/python -m compileall -qq --workers 2 $(VENV)/lib || true
# Threads that spin while they wait are 30 times slower as soon as anything else runs on their cores.
TRAIN := OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=passive
# A test that waits for ever, as kernels can that wait for each other, fails with its traceback.
LIMIT := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(LIMIT)

.PHONY: demo test test-full test-newest lint docs dist clean

# Fine-tune a tiny Llama on the GPU if there is one, else on THREADS cores; then load what was saved, generate, and draw.
demo: $(VENV)/demo.stamp
	$(TRAIN) $(BIN)/accelerate launch --quiet --config_file recipes/configs/accelerate_single.yaml recipes/sft.py

# Two lanes: CPU and GPU (left out where there is none), then the GPU kernels in Triton's interpreter, and those for Hopper
# in tests/tools/gluon_interpreter.py. The second runs whatever the first finds; either failure fails the target.
define lanes
	failed=0; \
	$(PYTEST) -m "not interpreter$(1)" || failed=1; \
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter$(1)" || failed=1; \
	exit $$failed
endef

# A few minutes: all but the tests marked full.
test: $(VENV)/dev.stamp
	$(call lanes, and not full)

# Everything.
test-full: $(VENV)/dev.stamp
	$(call lanes)

# All tests with the newest of every dependency that pip finds, in an environment of its own.
test-newest:
	$(MAKE) test-full VENV=$(VENV)-newest CONSTRAINTS=/dev/null

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

# Check the spelling of the pages and build them into site/. A broken link or a name that the API lacks fails.
# Needs Python >= 3.11.
# Pages link to REPOSITORY.
docs: export REPOSITORY ?= $(filter https://%,$(shell git remote get-url origin 2>/dev/null))
docs: $(VENV)/docs.stamp
	$(BIN)/codespell README.md CHANGELOG.md docs
	$(BIN)/zensical build --clean --strict

# Build sdist and wheel into dist/, the same to the byte for one commit, and check what an index shows of them.
dist: $(VENV)/dev.stamp
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV)-newest site build dist outputs .hypothesis .pytest_cache .ruff_cache

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[plot,train]'
	$(COMPILE)
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[docs]'
	$(COMPILE)
	touch $@ $(VENV)/demo.stamp
