# Two commands on a fresh machine: `make up` runs a cluster, `make test` passes the tests. Both do all set-up.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
TORCH := 2.13.0
# Where to find the CPU build of torch when pip's own configuration does not offer one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
# No other package may replace the CPU build of torch.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup up test lint format proto clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with everything: dependencies, CPU torch, the model

$(STAMP): pyproject.toml constraints.txt
	@bash deploy/make-venv.sh $(VENV)
	@echo "== torch $(TORCH) for CPU"
	@$(BIN)/python -c 'import torch,sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH)")' 2>/dev/null \
	  || $(BIN)/pip install "torch==$(TORCH)+cpu" \
	  || $(BIN)/pip install --index-url "$(TORCH_INDEX)" "torch==$(TORCH)"
	@echo "== dependencies"
	@$(BIN)/pip install -e '.[dev]'
	@echo "== model"
	@$(BIN)/python -m engine.weights.resolve
	@touch $@

up: setup  ## run a cluster on this machine; options in ARGS="..."
	@$(BIN)/tandem up $(ARGS)

test: lint  ## lint, types, import rules, stubs, all tests
	@echo "== tests"
	@$(BIN)/pytest --ignore=tests/cluster --ignore=tests/repo -n 2
	@echo "== tests of the repository and of real clusters"
	@$(BIN)/pytest tests/repo tests/cluster

lint: setup  ## ruff, mypy, import rules
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import rules"
	@$(BIN)/lint-imports

format: setup  ## format all code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: setup  ## write services/rpc again from proto/
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/services/rpc/*.proto


clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
