# The two commands of a newcomer: `make demo` and `make test`. Everything else is below.
.DEFAULT_GOAL := help
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: help setup demo up test test-slow check bench chaos bench-chaos proto clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## create .venv and install what is needed

$(READY): pyproject.toml deploy/setup.sh
	@PYTHON=$(PYTHON) bash deploy/setup.sh

demo: $(READY) ## router, two prefill and two decode ranks; three prompts streamed at once; a timeline of each
	@$(PY) -m services.router.demo --config deploy/dev.toml

up: $(READY) ## keep the dev cluster running (Ctrl-C drains it); PREFILL=2 DECODE=2 ROUTERS=1
	@$(PY) -m services.runtime.cluster up --config deploy/dev.toml --prefill $(or $(PREFILL),2) --decode $(or $(DECODE),2) --routers $(or $(ROUTERS),1)

test: $(READY) ## all CPU tests but the full matrices
	@$(PY) -m pytest -q -m "not slow and not bench"

test-slow: $(READY) ## the full matrices
	@$(PY) -m pytest -q -m "slow and not bench"

check: $(READY) ## lint, types, layers, generated protos
	@bash deploy/check.sh

bench: $(READY) ## measure; writes tests/bench/results/*.json
	@$(PY) -m tests.bench

chaos: $(READY) ## load and faults on a cluster, verified; exit code 1 on any breach; SEED=1 MINUTES=3
	@$(PY) -m services.doctor.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),3)

bench-chaos: $(READY) ## thirty minutes of it; writes tests/bench/results/chaos.json
	@$(PY) -m tests.bench chaos

proto: $(READY) ## regenerate the files beside proto/baton/v1/*.proto
	@$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. proto/baton/v1/*.proto

clean: ## remove .venv and what runs left
	rm -rf .venv .run
