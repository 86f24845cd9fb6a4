# Every target sets up what it needs in .venv by itself; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
EXTRAS := dev,eval,gpt1,cluster,track

.PHONY: demo tour test test-slow test-again coverage lint types site bench clean

demo: $(VENV)/.plume
	$(BIN)/plume demo

# one story from a text to served models; its folder is runs/tour
tour: $(VENV)/.all
	$(BIN)/python tour.py

# three at a time on two cores, each with one thread: a test that waits leaves its core to another
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.all
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.all
	$(PYTEST) -m slow

# what failed beside other tests, once more and alone: a busy machine fails few tests twice, a defect fails again
test-again: $(VENV)/.all
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# a fresh cache lets numba compile, so that what writes the compiled code is seen at work
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: export NUMBA_CACHE_DIR := $(CURDIR)/build/coverage/numba
coverage: $(VENV)/.all
	rm -rf build/coverage && mkdir -p build/coverage
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage/report.json
	$(BIN)/python tests/covered.py build/coverage/report.json

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.all
	$(BIN)/mypy

# the documentation, into build/site
site: $(VENV)/.all
	$(BIN)/mkdocs build --quiet

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# the lock file pins every version; the extras say which of them are wanted
$(VENV)/.plume: pyproject.toml requirements.lock | $(BIN)/python
	$(PIP) install torch==$(shell sed -n 's/^torch==//p' requirements.lock) -c requirements.lock
	$(PIP) install -c requirements.lock -e .
	touch $@

$(VENV)/.all: $(VENV)/.plume
	$(PIP) install -c requirements.lock -e ".[$(EXTRAS)]"
	touch $@

# the peers; llama.cpp is compiled here, which takes a few minutes and a C++ compiler. gcc 12 breaks its code for matrix
# tiles (Intel AMX), so it does without them unless CMAKE_ARGS says otherwise, for another compiler
CMAKE_ARGS ?= $(if $(filter x86_64,$(shell uname -m)),-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8)
$(VENV)/.bench: export CMAKE_ARGS := $(CMAKE_ARGS)
$(VENV)/.bench: $(VENV)/.all
	$(PIP) install -c requirements.lock -e ".[$(EXTRAS),bench]"
	touch $@

# with the newest pip, whatever the system has
$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info
