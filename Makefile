# One verb per habit. Everything is installed in .venv; each verb that needs it builds it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/*/*.proto protos/*/*/*.proto protos/*/*/*/*.proto)
GENERATED := baton/protos/v1/common_pb2.pyi
# Messages, numbers and names that no change may break: the descriptors that `make wire` wrote last.
WIRE := protos/wire.binpb
# Tests that share no processes: each may run in either of two workers. Of all others a whole file runs in one worker,
# because its tests share the nodes that they start. These wait for a quarter of their time: hence a third worker.
SINGLE := tests/unit tests/conformance tests/test_architecture.py tests/simulation
# Tests of kernels, then of those of recurrent layers. On a GPU they run compiled.
KERNELS := tests/unit/attention tests/unit/kvcache tests/unit/engine/test_choose_kernel.py tests/unit/engine/test_sampler.py \
	$(addprefix tests/unit/models/test_, \
	decode_matmul.py expert_dispatch.py expert_kernels.py fp8_kernels.py invariant_matmul.py layer_kernels.py packed_kernels.py peer_sums.py \
	quantized_rows.py reading.py)
RECURRENT := $(addprefix tests/unit/models/test_, gated_delta.py short_conv.py selective_scan.py continued_states.py \
	states_in_order.py)

# Empty: Python writes compiled modules. Where an environment forbids it, as images do, each process compiles torch and
# all else anew: a node's imports then took 5.8 s of CPU in place of 2.8 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install protos wire run test test-quick test-changed test-compiled simulate chaos fuzz test-gpu test-clients test-families test-sweeps test-docs check check-deploy rules image format bench docs dist-check clean

help:  ## Show the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

install: $(STAMP) $(GENERATED)  ## Build .venv with all dependencies, and generate the protobuf code

$(STAMP): pyproject.toml deploy/packages/client/pyproject.toml deploy/packages/tools/pyproject.toml constraints.txt .ci/install
	@PYTHON=$(PYTHON) .ci/install $(VENV)
	@touch $@

protos: $(GENERATED)  ## Generate the protobuf code

$(GENERATED): $(PROTOS) protos/generate.py | $(STAMP)
	@echo "==> generating protobuf code"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py

run: install  ## Start a gateway, a prefill and a decode node, send a prompt, show the receipt, stop
	@$(BIN)/baton demo

simulate: install  ## Run the cluster in memory under faults: SEEDS=100000 for many, SEED=7 to replay one
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

chaos: install  ## Storms over real processes: MINUTES=20 by default, SEED=7 MINUTES=2 to replay a round, SOAK=1 for a soak
	@$(BIN)/python -m tests.chaos $(if $(SOAK),--soak) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

fuzz: install  ## Feed random inputs to every parser: COUNT=1000000 for many, TARGET=name FIRST=seed to replay
	@$(BIN)/python -m tests.fuzz --count $(or $(COUNT),1000) $(if $(TARGET),--target $(TARGET)) \
		$(if $(FIRST),--first $(FIRST)) $(if $(REPORT),--report)

test-gpu: install  ## Run the tests that need a GPU, with compiled kernels, and write the conformance table
	@$(BIN)/python -m pytest -n 8 --dist loadgroup tests/gpu $(KERNELS) $(RECURRENT) tests/conformance/attention \
		--attention-table bench/results/attention_conformance.md

test: install  ## Run every test that needs no GPU, but for the sweeps
	@$(BIN)/python -m pytest -m "not gpu and not sweep" -n 2 --dist worksteal $(SINGLE)
	@$(BIN)/python -m pytest -m "not gpu and not sweep" -n 3 --dist loadfile --no-loadscope-reorder -p tests.longest_first $(addprefix --ignore=,$(SINGLE) tests/clients tests/gpu tests/docs/test_run.py)

test-compiled: install  ## Compile the kernels for an H200 on a machine without a GPU, where the other tests interpret them
	@$(BIN)/python -m pytest -p tests.compile_only -m "not gpu" -n 2 $(KERNELS) $(RECURRENT)

test-sweeps: install  ## Run the sweeps: more seeds and combinations of what `make test` has one or a few of
	@$(BIN)/python -m pytest -m "sweep and not gpu" -n 2 --dist worksteal $(SINGLE) tests/integration/test_broken_start.py

test-quick: install  ## Run the tests without torch and without real processes
	@$(BIN)/python -m pytest -m "not gpu and not slow and not sweep" -n 2 -q $$($(BIN)/python -m tests.selection quick)

test-changed: install  ## Run the tests that import what differs from SINCE=main
	@$(BIN)/python -m pytest -m "not gpu and not sweep" -n 2 --dist loadfile -q $$($(BIN)/python -m tests.selection changed $(if $(SINCE),--since $(SINCE)))

test-clients: install  ## Run clients that other people wrote against a cluster (installs 5 GB in .clients the first time)
	@$(BIN)/python -m tests.clients.install
	@$(BIN)/python -m pytest tests/clients

test-families: install  ## Run every family in every form against transformers and PEFT (MODELS=llama,bloom for some), and write the table's outcomes
	@$(BIN)/python -m tests.conformance.families $(if $(MODELS),--models $(MODELS))

test-docs: install  ## Run the commands of every page, in order, against real clusters
	@$(BIN)/python -m pytest tests/docs/test_run.py

check: install  ## Check lint, format, types and the wire
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint protos
	@$(BIN)/buf breaking protos --against $(WIRE)
	@$(BIN)/buf build protos --exclude-source-info --output - | cmp --silent - $(WIRE) \
		|| { echo "$(WIRE) differs from the .proto files: run \`make wire\`"; exit 1; }

check-deploy: install  ## Check manifests, chart and Dockerfile: schemas, helm lint, hadolint, checkov (installs it)
	@$(BIN)/python -m pytest tests/deploy
	@$(BIN)/python -m tests.deploy.scan

image:  ## Build the image TARGET, or all of them; with REGISTRY push it with a bill of materials and print its digest (needs docker or buildah)
	@.ci/image "$(or $(TARGET),all)" "$(REGISTRY)"

rules:  ## Check and test the alerts of deploy/monitoring (downloads promtool where there is none)
	@.ci/promtool check rules deploy/monitoring/rules.yaml
	@.ci/promtool test rules deploy/monitoring/rules_test.yaml

wire: install  ## Record the .proto files in protos/wire.binpb, unless they break what it has
	@$(BIN)/buf breaking protos --against $(WIRE)
	@$(BIN)/buf build protos --exclude-source-info --output $(WIRE)

format: install  ## Format the code and apply automatic fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: install  ## Measure transport, hand-over and latency, and write bench/results
	@$(BIN)/python -m bench

docs: install  ## Write the pages and tables that come from the code, and build the site into site/
	@$(BIN)/python -m docs.configuration
	@$(BIN)/python -m docs.metrics
	@$(BIN)/python -m docs.tracing
	@$(BIN)/python -m docs.api
	@$(BIN)/python -m docs.attention
	@$(BIN)/python -m docs.models
	@$(BIN)/python -m deploy.monitoring.prometheus_rule
	@$(BIN)/python -m deploy.monitoring.dashboard
	@$(BIN)/python -m docs.wire
	@$(BIN)/python -m docs.troubleshooting
	@$(BIN)/python -m docs.benchmarks
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

dist-check: install  ## Build sdist and wheels, run each of them, run tests of the sdist
	@PYTHON=$(BIN)/python .ci/dist-check

clean:  ## Remove everything that was built
	rm -rf $(VENV) .clients .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	rm -f baton/protos/*/*_pb2*.py* baton/protos/*/*/*_pb2*.py*
