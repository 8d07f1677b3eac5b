# Verbs for people and for CI. `make help` lists them, and these lines of variables:
#
#   make bench ARGS="--help"                        arguments for the command behind a verb
#   make test ARGS="-n 0 -k parity"                 the same, for pytest: here in one process
#   make chaos CHAOS_SECONDS=60                     how long to break things, in seconds
#   make validate K8S=my-cluster                    one folder of manifests; without it all overlays
#   make gpu-check GPU_PYTHON=python3               the interpreter that has torch for the GPU
#   make setup PYTHON=/path/to/python3.12           another interpreter (3.11 or newer)
#   make setup TORCH=torch==2.12.1                  another torch
#   make setup PIP_TORCH_ARGS="--index-url ..."     torch from another index, such as the CPU index
#                                                   of the PyTorch project (the default index may
#                                                   bring a CUDA build of several gigabytes)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# A service's start is imports, half of it compiling them: the bytecode is kept, also where the
# environment says not to. `make clean` removes it.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
	$(if $(shell $(name) -c 'import sys; print("yes" * (sys.version_info >= (3, 11)))' 2>/dev/null),$(name))))
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=
CHAOS_SECONDS ?= 600
# Modules are compiled when they are first imported: most of them never are.
PIP_ARGS := --quiet --disable-pip-version-check --no-compile
BUF_VERSION ?= 1.75.0
ARGS ?=

VENV := .venv
# Apart, so that the tools are no part of what they look at.
AUDIT := .audit
AUDIT_TOOLS := pip-audit==2.10.1 cyclonedx-bom==7.5.0
# 220 MB with packages of its own.
POLICY := .checkov
POLICY_TOOLS := checkov==3.3.30
DOCS := .docs
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Straight from the checkout: a machine lent for minutes has no time for a set-up.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
BUF := node_modules/.bin/buf
BUF_INSTALLED := node_modules/.buf-$(BUF_VERSION)
# The longest first, so that what is left at the end is small.
TEST_DIRS := tests/integration tests/distribution tests/deploy tests/contract tests/unit
# A test that hangs fails in time. Two files at a time, a processor each: most of a long test is waiting for processes that it started.
PYTEST_FLAGS := -q --durations=15 --numprocesses=2 --dist=loadfile --no-loadscope-reorder --timeout=300

.PHONY: help setup demo serve test check format protos bench verify parity distribution faults matrix fuzz reference render validate policy install-check pin-digests audit docs docs-check chaos rehearsal scale console-check gpu-check clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables:\n'
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv and install everything, pinned

demo: $(INSTALLED) ## Serve the embedded pair, run six prompts with and without speculation, stop
	$(BIN)/specserve demo $(ARGS)

serve: $(INSTALLED) ## Serve the embedded pair behind an OpenAI endpoint
	$(BIN)/specserve serve $(ARGS)

test: $(INSTALLED) ## Run the tests: unit, contract, integration, distribution
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) $(ARGS) $(TEST_DIRS)

check: $(INSTALLED) ## Lint, format, types, import directions, contract lint, stubs up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory buf-lint
	$(BIN)/python -m pytest -q tests/contract/test_stubs.py

format: $(INSTALLED) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

protos: $(INSTALLED) ## Regenerate the stubs in services/specserve/rpc/v1 from protos/
	$(BIN)/python protos/generate.py services

bench: $(INSTALLED) ## Measure: ARGS="--report FILE.html" weighs speculation against target-only
	$(BIN)/specserve bench $(ARGS)

verify: $(INSTALLED) ## Prove the embedded pair exact, and keep the record (minutes)
	$(BIN)/specserve verify $(ARGS)

parity: $(INSTALLED) ## Compare speculation on and off, token for token
	$(BIN)/specserve verify --suite parity --dtype float32 $(ARGS)

distribution: $(INSTALLED) ## Test that speculation keeps the target's law
	$(BIN)/specserve verify --suite distribution $(ARGS)

faults: $(INSTALLED) ## Plant each known fault, see that `specserve verify` finds it, and that poison requests are found out
	$(BIN)/python -m pytest -q $(ARGS) tests/faults

matrix: $(INSTALLED) ## Run all combinations of options, rules, K, streams and batches (CI: pairwise)
	SPECSERVE_MATRIX=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s $(ARGS) tests/integration/test_option_matrix.py

fuzz: $(INSTALLED) ## Send 10,000 requests, right and wrong, to a running pair (CI: 500)
	SPECSERVE_FUZZ_REQUESTS=$${SPECSERVE_FUZZ_REQUESTS:-10000} OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -s $(ARGS) tests/integration/test_fuzz.py

reference: $(INSTALLED) ## Write the tables of docs/api.md from the published document
	PYTHONPATH=services:tests $(BIN)/python -m support.api_reference

render: $(INSTALLED) ## Render serve-config.yaml from specserve.yaml in K8S=DIR, by default in all overlays
	for folder in $(or $(K8S),$(wildcard k8s/overlays/*)); do \
		$(BIN)/specserve config render --config $$folder/specserve.yaml --output $$folder/serve-config.yaml; \
	done

validate: $(INSTALLED) ## Check manifests: K8S=k8s/overlays/gpu-pools, or a folder of your own
	PYTHONPATH=services:tests $(BIN)/python -m support.manifests $(or $(K8S),$(wildcard k8s/overlays/*))

policy: $(INSTALLED) $(POLICY)/.installed ## checkov over the pods and documents of the overlays, or of K8S=DIR; it must find planted faults first
	PYTHONPATH=services:tests $(BIN)/python -m support.manifests.policy $(POLICY)/bin/checkov $(or $(K8S),$(wildcard k8s/overlays/*))

install-check: $(INSTALLED) ## Run the image's install steps in a bare directory; spoilt copies must fail
	$(BIN)/python -m pytest -q $(ARGS) tests/install

pin-digests: $(INSTALLED) ## Add to the image tags of deploy/ what they mean in the registry now (asks Docker)
	$(BIN)/python deploy/pin_digests.py

chaos: $(INSTALLED) ## Break processes under load and check every token; CHAOS_SECONDS=600
	OMP_NUM_THREADS=1 PYTHONPATH=services:tests $(BIN)/python -m chaos --seconds $(CHAOS_SECONDS) $(ARGS)

audit: $(INSTALLED) $(AUDIT)/.installed ## Known vulnerabilities and a bill of materials (sbom.cdx.json); ARGS=--offline: the bill alone
	$(AUDIT)/bin/python deploy/audit.py --python $(BIN)/python $(ARGS)

docs: $(DOCS)/.installed ## Build the pages of docs/ as a site in build/docs; a dead link is an error
	$(DOCS)/bin/mkdocs build

docs-check: $(INSTALLED) ## Links, files, commands, flags and metrics that the documents name (make test does it, too)
	$(BIN)/python -m pytest -q tests/unit/test_documents.py

rehearsal: $(INSTALLED) ## Several Ray nodes on this machine with the rendered config: scale, kill, upgrade, lose the head
	SPECSERVE_REHEARSAL=1 $(BIN)/python -m pytest -q -s $(ARGS) --ignore tests/rehearsal/test_scale.py tests/rehearsal

scale: $(INSTALLED) ## Scale pools under load under Ray, 1 to 4 to 1 targets, 0 to 4 to 1 drafts; tokens/s by targets; minutes
	SPECSERVE_REHEARSAL=1 $(BIN)/python -m pytest -q -s $(ARGS) tests/rehearsal/test_scale.py
	$(BIN)/specserve bench --suite pools

console-check: $(INSTALLED) ## Drive the page /console in a Chromium (on PATH, or SPECSERVE_CHROMIUM=FILE)
	$(BIN)/pip install -q -c constraints.txt -e '.[console]'
	$(BIN)/python -m pytest -q $(ARGS) tests/console

gpu-check: ## Check exactness and speed on a GPU, in minutes; needs no set-up, names what is missing
	PYTHONPATH="services$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m specserve.tools.gpu_check $(ARGS)

clean: ## Remove what the other verbs made here: .venv, node_modules, caches, builds
	rm -rf $(VENV) $(AUDIT) $(POLICY) $(DOCS) sbom.cdx.json node_modules dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find services tests protos -name __pycache__ -type d -prune -exec rm -rf {} +

# Torch first and by itself, so that the index chosen for it serves nothing else. The constraints
# name the torch that was asked for in place of their own.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'make: no Python 3.11 or newer found; name one: make setup PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'make: $(PYTHON) is not Python 3.11 or newer; name one: make setup PYTHON=...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > $(VENV)/constraints.txt
	$(BIN)/python -m pip install $(PIP_ARGS) $(PIP_TORCH_ARGS) -c $(VENV)/constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install $(PIP_ARGS) -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

$(POLICY)/.installed: Makefile
	$(PYTHON) -m venv $(POLICY)
	$(POLICY)/bin/python -m pip install $(PIP_ARGS) $(POLICY_TOOLS)
	touch $@

$(DOCS)/.installed: Makefile constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt mkdocs
	touch $@

$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install $(PIP_ARGS) $(AUDIT_TOOLS)
	touch $@

# The contract's linter comes from npm. Without npm a developer is told; CI (CI=true) fails.
.PHONY: buf-lint
buf-lint:
	@if command -v npm > /dev/null; then \
		$(MAKE) --no-print-directory $(BUF_INSTALLED); \
		echo '$(BUF) lint protos'; \
		$(BUF) lint protos; \
	elif [ "$${CI:-}" = true ]; then \
		echo 'make: buf lint needs npm, and there is none' >&2; exit 1; \
	else \
		echo 'make: no npm here, so buf lint is left out (CI runs it)' >&2; \
	fi

$(BUF_INSTALLED):
	npm install --prefix . --no-save --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error @bufbuild/buf@$(BUF_VERSION)
	touch $@
