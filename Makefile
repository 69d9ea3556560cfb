# `make help` lists the targets. Every target sets up its own requirements; only Python 3.11+ with venv must be present.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SRC := gateway mirror loaders client ops tests
# Tests that need nothing but Python run in two processes. So do those against Kafka and Spark where there are two cores:
# the tests of a file stay together, and each process has its own Kafka. Crash tests load the machine by themselves.
PAIRED := $(shell test "$$(nproc 2>/dev/null || echo 1)" -gt 1 && printf '%s' '-n 2 --dist loadfile')
ALONE := -n 2 tests/unit tests/model
BESIDE := $(PAIRED) tests/integration
CRASH := tests/crash
# The loader's tests once more, with their tables in a store: those that could show something else there.
STORED := tests/integration/loader/test_load_table.py tests/crash/loader/test_loader_killed.py
# The core of what depends on Kafka, with the older versions of it.
OLDER_KAFKA := tests/crash/gateway/test_gateway_crash.py tests/crash/mirror/test_mirror_crash.py \
	tests/integration/gateway/test_transactional_producer.py tests/integration/gateway/test_hanging_transactions.py \
	tests/integration/mirror/test_mirror.py

.PHONY: help setup demo demo-hbase datacenters up push-client check format test test-all test-long docs reference bench soak clean
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

setup: $(STAMP) ## create .venv with all extras; fetch Kafka and the Spark jars
	@$(BIN)/python -m logferry.ops.runtime.java
	@$(BIN)/python -m logferry.ops.runtime.jars

demo: setup ## the full pipeline on this machine, with kills and a final audit
	$(BIN)/logferry demo

demo-hbase: setup ## from a put in HBase to a row of a table, with kills and a comparison (needs a JDK)
	$(BIN)/python -m logferry.ops.demo.hbase

datacenters: setup ## two data centres on this machine by the production guide; one is cut off (needs root)
	$(BIN)/python -m tests.datacenters $(ARGS)

up: setup ## a local stack in the foreground: Kafka and the gateway
	$(BIN)/logferry up

push-client: $(STAMP) ## build the push-client as one file for Python 3.9+: dist/logferry-push.pyz
	$(BIN)/python -m logferry.ops.runtime.build_pyz dist/logferry-push.pyz

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check $(SRC)
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/mypy -p logferry.gateway -p logferry.loaders -p logferry.client -p logferry.ops -p logferry.mirror -p tests

format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix $(SRC)
	$(BIN)/ruff format $(SRC)

test: setup ## unit, model, and the main way of each feature (ten minutes)
	$(BIN)/pytest -m 'not long and not crash and not full' $(ALONE)
	$(BIN)/pytest -m 'not long and not crash and not full' $(BESIDE)

test-all: setup ## every test but the long ones; CI runs this
	$(BIN)/pytest -m 'not long' $(ALONE)
	$(BIN)/pytest -m 'not long' $(BESIDE)
	$(BIN)/pytest -m 'not long' $(CRASH)
	$(BIN)/pytest -m 'not long and not anywhere' $(PAIRED) --store s3 $(STORED)

test-long: setup ## every test, including the long ones
	$(BIN)/pytest $(ALONE)
	$(BIN)/pytest $(BESIDE)
	$(BIN)/pytest $(CRASH)
	$(BIN)/pytest --store s3 tests/integration/loader tests/crash/loader
	$(BIN)/pytest --store s3proxy tests/integration/loader tests/crash/loader
	$(BIN)/pytest --store hdfs tests/integration/loader tests/crash/loader
	for version in 4.2 4.1; do LOGFERRY_KAFKA_VERSION=$$version $(BIN)/pytest -m 'not long' $(OLDER_KAFKA) || exit 1; done
	-GOBIN=$(CURDIR)/$(BIN) go install github.com/fsouza/fake-gcs-server@v1.56.1
	$(BIN)/pytest --store gs $(STORED) tests/integration/loader/test_table_reload.py
	-npm install --no-fund --no-audit --prefix $(CURDIR)/.venv azurite@3.35.0
	$(BIN)/pytest --store azure $(STORED) tests/integration/loader/test_table_reload.py

docs: $(STAMP) ## build the documentation into site/; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file ops/mkdocs.yml

reference: $(STAMP) ## generate ops/docs/reference from the code
	$(BIN)/python -m tests.support.reference

bench: setup ## run the benchmarks; BENCH=name,name selects some
	$(BIN)/python -m logferry.ops.bench $(BENCH)

soak: setup ## random faults over the whole way, with a verdict; MINUTES=10 SEED=7
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(SOAK)

clean: ## remove the environment and all build output
	rm -rf $(VENV) .mypy .mypy_cache .pytest_cache .ruff_cache build dist site *.egg-info
