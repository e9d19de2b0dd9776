# Works with GNU make 3.81, which macOS ships. PYTHON=... names another interpreter, MODEL=... another model,
# ARGS=... passes options on: make chat MODEL=qwen3-4b ARGS="--draft qwen3-0.6b"

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
ifeq ($(strip $(PYTHON)),)
PYTHON := python3
endif

VENV := .venv
BIN := $(VENV)/bin
TEST_ENV := build/test-env
MODEL ?= smollm2
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# A process per core, each file's tests in one of them, and libraries that leave it at that. One that dies is not
# started again: it would meet the same test.
PYTEST_WORKERS := -n auto --dist loadfile --max-worker-restart=0
PYTEST_THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help chat bench test check test-slow sweep clean python blas-hint

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

chat: $(VENV)/.installed blas-hint ## install into .venv, get the model, open the chat
	@$(BIN)/localspec models pull $(MODEL) >/dev/null
	@$(BIN)/localspec chat $(MODEL) $(ARGS)

bench: $(VENV)/.installed blas-hint ## plain against speculative decoding, paired
	@$(BIN)/localspec bench $(MODEL) $(ARGS)

test: python ## lint, types and tests in a fresh environment, as CI runs them
	rm -rf build
	$(PYTHON) -m venv $(TEST_ENV)
	$(TEST_ENV)/bin/python $(PIP_INSTALL) -c .ci/constraints.txt '.[test]'
	cd build && test-env/bin/python ../.ci/installed.py
	$(TEST_ENV)/bin/ruff check .
	$(TEST_ENV)/bin/mypy -p localspec
	$(PYTEST_THREADS) $(TEST_ENV)/bin/python -m pytest $(PYTEST_WORKERS)

check: $(VENV)/.installed-test ## the same in .venv: faster
	$(BIN)/ruff check .
	$(BIN)/mypy -p localspec
	$(PYTEST_THREADS) $(BIN)/python -m pytest $(PYTEST_WORKERS)

test-slow: $(VENV)/.installed-test ## the tests that need the real models, and hours
	@$(BIN)/python $(PIP_INSTALL) -e '.[test,slow]'
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=0

sweep: $(VENV)/.installed-test ## the same tokens on every architecture: half an hour
	$(BIN)/python tests/sweep.py $(ARGS)

clean: ## remove what was built, not what was downloaded
	rm -rf build dist .venv *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	@$(MAKE) -s python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing localspec into $(VENV) ..."
	@$(BIN)/python $(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@$(BIN)/python $(PIP_INSTALL) -e '.[test]'
	@touch $@

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "localspec needs Python 3.11 or newer, and $(PYTHON) is not; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }

blas-hint:
	@if [ -f /etc/debian_version ] && ! ls /usr/lib/*/openblas-*/libopenblas.so.0 >/dev/null 2>&1; then \
		echo "for several times the speed on this machine: sudo apt install libopenblas0-pthread"; fi
