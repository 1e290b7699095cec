# One verb per habit. Everything lives in .venv; `make install` builds it, and every other verb sees to that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/baton/v1/*.proto)
GENERATED := protos/baton/v1/common_pb2.pyi
# Tests that only compute run two at a time, and so do files of tests that start processes and wait for no deadline; those
# with deadlines and faults run one after the other.
COMPUTING := tests/unit tests/simulation tests/conformance/attention tests/test_architecture.py $(addprefix tests/conformance/test_, \
	covering.py kv_convert.py kv_fp8.py kv_matrix.py kv_ranks.py kv_states.py kv_windows.py)
UNHURRIED := tests/deploy $(addprefix tests/integration/test_, \
	cli.py kv_convert.py layer_groups.py out_of_memory.py settings.py tokens.py transfer_benchmarks.py)
# Tests of kernels, which run compiled where there is a GPU.
KERNELS := tests/unit/attention tests/unit/engine/test_choose_kernel.py tests/unit/engine/test_sampler.py \
	$(addprefix tests/unit/models/test_, \
	decode_matmul.py expert_kernels.py fp8_kernels.py invariant_matmul.py layer_kernels.py reading.py)

.DEFAULT_GOAL := help
.PHONY: help install protos run test simulate test-gpu check format bench docs clean

help:  ## Show these verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

install: $(STAMP) $(GENERATED)  ## Build .venv with all dependencies, and the protobuf code

$(STAMP): pyproject.toml constraints.txt
	@echo "==> creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing dependencies (minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

protos: $(GENERATED)  ## Build the protobuf code

$(GENERATED): $(PROTOS) protos/generate.py | $(STAMP)
	@echo "==> building protobuf code"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py

run: install  ## Start a gateway, a prefill and a decode node, send a prompt, show the receipt, stop
	@$(BIN)/baton demo

test-gpu: install  ## Run on a GPU what needs one, kernels compiled, and write the conformance table
	@$(BIN)/python -m pytest -n 8 --dist loadgroup tests/gpu $(KERNELS) tests/conformance/attention \
		--attention-table bench/results/attention_conformance.md

test: install  ## Run every test but the GPU's
	@$(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal $(COMPUTING)
	@$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile $(UNHURRIED)
	@$(BIN)/python -m pytest -m "not gpu" $(addprefix --ignore=,$(COMPUTING) $(UNHURRIED))

simulate: install  ## Run the cluster in memory under faults: SEEDS=100000 for many, SEED=7 to replay one
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

check: install  ## Lint, format check, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: install  ## Measure transport, hand-over and latency; writes bench/results
	@$(BIN)/python -m bench

docs: install  ## Write the pages and tables that are made from the code
	@$(BIN)/python -m docs.configuration
	@$(BIN)/python -m docs.attention

clean:  ## Remove everything that was built
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	rm -f protos/baton/v1/*_pb2*.py*
