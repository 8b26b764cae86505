# CPU set-up, demo and tests. `make help` lists the targets.
#
# setup_cpu.py makes .venv on first use, refreshes it when its inputs have changed, and otherwise
# returns at once.

BIN := .venv/bin
ARGS ?=
# Test processes; each takes one file of tests at a time, in the order of tests/conftest.py.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# PYTHON chooses the interpreter of .venv; any Python 3 can run the set-up itself.
ifdef PYTHON
export PYTHON
SETUP_PYTHON := $(PYTHON)
else
SETUP_PYTHON := python3
endif

# OpenMP threads that spin while they wait make busy machines 10 to 100 times slower.
export OMP_WAIT_POLICY ?= passive
export VLLM_NO_USAGE_STATS ?= 1
# Without compiled files on disk, each process spends 20 s in the compiler to import vLLM.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test unit lint format docs docs-tools test-tools bench dist lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## create or refresh .venv (vLLM for the CPU, the plugin, test tools)
	@command -v $(SETUP_PYTHON) >/dev/null || { echo "error: $(SETUP_PYTHON) not found; Python 3.11 is needed" >&2; exit 1; }
	@$(SETUP_PYTHON) packaging/setup_cpu.py

demo: venv ## run plain vLLM and draft trees side by side on SmolLM2-135M, or on the model that ships without a network
	@$(BIN)/vllm-trie demo $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test: venv docs-tools test-tools ## all tests: unit tests, then those that start an engine
	@$(PYTEST) --durations=30 $(ARGS)

UNITS := tests/unit $(wildcard tests/extras/*/unit)
# A path among ARGS replaces these.
unit: export OMP_NUM_THREADS ?= 1
unit: venv ## the unit tests only (two minutes), or ARGS=path
	@$(PYTEST) $(if $(filter tests/%,$(ARGS)),,$(UNITS)) $(ARGS)

lint: venv ## check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: venv ## apply style
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: venv docs-tools ## build the documentation into site/; warnings are errors
	@$(BIN)/python -m docs.generate
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

# Without a network the other tests still run; the one that builds the site says what it lacks.
docs-tools: venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
		-r requirements/docs.txt || echo "no mkdocs: the site cannot be built here" >&2

# Debian's packages, as root; the tests that lack them are skipped with that reason.
TEST_PACKAGES := chromium fonts-dejavu-core curl redis-server
test-tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& ! { command -v chromium && command -v curl && command -v redis-server; } >/dev/null; then \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install --no-install-recommends $(TEST_PACKAGES); } >/dev/null 2>&1 \
		|| echo "no $(TEST_PACKAGES): their tests are skipped" >&2; fi

# REPLAYS need the files that SPEC_BENCH_QUESTIONS and SPEC_BENCH_ANSWERS name.
REPLAYS := replay ngram_paper
bench: venv ## run the benchmarks; results go to .bench/*.json
	@mkdir -p .bench
	@set -e; for script in $(filter-out benchmarks/record.py,$(wildcard benchmarks/*.py)); do \
		name=$$(basename "$$script" .py); \
		if [ -z "$$SPEC_BENCH_QUESTIONS" ] && echo " $(REPLAYS) " | grep -q " $$name "; then \
			echo "== $$name skipped: SPEC_BENCH_QUESTIONS is not set"; continue; fi; \
		echo "== $$name"; \
		$(BIN)/python "$$script" --json ".bench/$$name.json" $(ARGS); done

# The wheel's tag is checked: its cores may use no symbol that manylinux_2_28 lacks.
dist: venv ## build the source distribution and the wheel with compiled kernels into dist/
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/dist.txt
	@rm -rf dist build/wheel && $(BIN)/python -m build --outdir build/wheel .
	@PATH="$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --plat manylinux_2_28_x86_64 \
		--wheel-dir dist build/wheel/*.whl
	@mv build/wheel/*.tar.gz dist/ && ls -l dist

lock: venv ## resolve requirements/cpu.txt again (ARGS=--upgrade for the newest versions)
	@$(BIN)/python packaging/lock_cpu.py $(ARGS)

clean: ## remove .venv and everything generated
	rm -rf .venv .bench site build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	rm -rf vllm_trie/native/cores
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
