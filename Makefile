# `make help` lists what there is. Every target sets up what it needs; nothing but Python 3.11+ with venv is asked for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SRC := gateway mirror loaders client ops tests

.PHONY: help setup demo up push-client check format test test-long bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "logferry needs Python 3.11 or newer, this is %d.%d; set PYTHON=" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m logferry.ops.runtime.java --present || $(BIN)/pip install --disable-pip-version-check -e '.[java]'
	@mkdir -p .mypy && ln -sfn .. .mypy/logferry
	@touch $@

setup: $(STAMP) ## make .venv with everything, and fetch Kafka and the Spark jars
	@$(BIN)/python -m logferry.ops.runtime.java
	@$(BIN)/python -m logferry.ops.runtime.jars

demo: setup ## the whole way on this machine, while processes are killed, with a proof at the end
	$(BIN)/logferry demo

up: setup ## a local stack in the foreground: Kafka and the gateway
	$(BIN)/logferry up

push-client: $(STAMP) ## the push-client as one file: dist/logferry-push.pyz, for any Python from 3.9 on
	$(BIN)/python -m logferry.ops.runtime.build_pyz dist/logferry-push.pyz

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check $(SRC)
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/mypy -p logferry.gateway -p logferry.loaders -p logferry.client -p logferry.ops -p logferry.mirror

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix $(SRC)
	$(BIN)/ruff format $(SRC)

test: setup ## the tests (minutes)
	$(BIN)/pytest -m 'not long'

test-long: setup ## all tests, the long ones too
	$(BIN)/pytest

bench: setup ## measure; BENCH=name,name for some only
	$(BIN)/python -m logferry.ops.bench $(BENCH)

clean: ## remove the environment and what was built
	rm -rf $(VENV) .mypy .mypy_cache .pytest_cache .ruff_cache build *.egg-info
