# `make demo` and `make test` are all there is to know: each creates .venv on first use.
#   make demo TORCH="torch==2.13.0 --index-url URL"   takes torch from another index (a CPU build, say)
#   make demo PYTHON=python3.12                        another interpreter
PYTHON ?= python3
TORCH ?= torch
PIP_FLAGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt $(PIP_FLAGS)

.PHONY: demo test test-slow lint types clean

demo: .venv/base
	$(BIN)/hybridscope demo --out runs/demo

test: .venv/dev lint types
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

test-slow: .venv/dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/pyright

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

.venv/dev: .venv/base
	$(PIP) -e '.[dev,smol]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info runs
