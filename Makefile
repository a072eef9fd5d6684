# `make` lists the targets. Each sets up .venv first. ARGS passes options on: make up ARGS="--instances 8".
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup up check lint test test-console screenshots dashboards settings manifests test-containers test-upgrade test-vllm test-clients routers mutation fuzz results lock audit sbom clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

setup: .venv/.ready ## create .venv with everything that development needs

.venv/.ready: deploy/requirements.txt pyproject.toml shared/pointsman_lab/pyproject.toml shared/pointsman_native/src/pointsman_native/key_table.pyx
	@echo "setting up .venv (once; a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit("Pointsman needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r deploy/requirements.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . -e shared/pointsman_lab ./shared/pointsman_native
	@touch $@

up: setup ## run a fleet of simulated engines until Ctrl-C
	@$(BIN)/pointsman up $(ARGS)

NO_ENGINE := not vllm and not clients and not containers and not upgrade

# The modules left out take half of the time of these folders; `make test` runs them.
SLOW := $(addprefix --ignore tests/,tidy/test_contributing.py unit/lab unit/test_poison.py unit/adapters/test_tokenizer.py \
  unit/adapters/test_checkpoint_retention.py unit/cli/test_doctor.py unit/cli/test_simulate_command.py \
  unit/simulation/test_workload_generators.py)
check: lint ## lint, types, layers and the fast tests: under a minute
	$(BIN)/pytest -q -n 2 --dist loadfile --hypothesis-profile check -m "$(NO_ENGINE) and not quiet" -k "not jetstream" $(SLOW) \
	  tests/tidy tests/golden tests/unit tests/contract/test_event_log.py tests/contract/test_leadership.py $(ARGS)

lint: setup ## format, lint rules, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -n 2
	$(BIN)/lint-imports

# Tests that measure time run first, alone; then the others in three processes, since many wait. Files in their order: xdist would
# leave those of one long test for the end, where they have nothing beside them.
# The hundreds of processes that tests start do not compile our sources again. All are equally nice: on a full machine a
# fleet whose recorder, rebalancer and scaler are nicer than the rest is ready seconds later. A part: make test ARGS="-k dualmap".
NONE_CHOSEN := 5
QUIET := tests/integration/test_agreement.py tests/integration/test_hostile_bodies.py
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest
test: lint ## everything that CI runs: lint and all tests that need no engine
	$(PYTEST) -q -m "$(NO_ENGINE) and quiet" $(QUIET) $(ARGS) || test $$? -eq $(NONE_CHOSEN)
	nice -n 10 $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "$(NO_ENGINE) and not quiet" $(ARGS)

# With the Chromium of this machine, or Debian's, unpacked below .tools/ (160 MB, once). A part: ARGS="-k keyboard".
test-console: setup ## the console's pages in a real browser
	POINTSMAN_CHROMIUM=$$($(BIN)/python -m tests.support.chromium) && export POINTSMAN_CHROMIUM && \
	  $(BIN)/pytest -m browser tests/console $(ARGS)

screenshots: setup ## draw docs/images/console-*.png from a fleet under load; two minutes
	$(BIN)/python -m tests.console.screenshots

# Fails where no Docker engine answers. A part: make test-containers ARGS="-k kill".
test-containers: setup ## the fleet in containers, killed, frozen, cut off, upgraded and scaled; 15 minutes
	$(BIN)/pytest -m containers tests/containers $(ARGS)

# The older one is a commit: skipped, and loudly, in a checkout without it. The first run installs it below .tools/.
test-upgrade: setup ## two releases in one fleet under load: rolled forward and back; two minutes
	$(BIN)/pytest -m upgrade tests/upgrade $(ARGS)

# Creates the engines' environment on the first run (docs/engines.md), or uses the one in POINTSMAN_VLLM_DIR.
test-vllm: setup ## the tests that need real vLLM engines, on two CPU engines
	$(BIN)/pytest -m vllm tests/vllm $(ARGS)

# docs/testing.md describes it. Another sample: make mutation ARGS="--sample 50 --seed 7 --only translator".
mutation: setup ## plant small defects one at a time and count those that tests find; about 15 minutes
	$(BIN)/pointsman-lab mutation $(ARGS)

# Clients have an environment of their own (1.4 GB). Also runs `vllm bench serve` if the environment of test-vllm exists.
CLIENTS ?= .venv-clients
test-clients: setup $(CLIENTS)/.ready ## third-party clients (docs/clients.md) against simulated engines
	POINTSMAN_CLIENTS_DIR=$(CLIENTS) $(BIN)/pytest -m clients tests/clients $(ARGS)

$(CLIENTS)/.ready: pyproject.toml | setup
	@echo "setting up $(CLIENTS) (once; some minutes)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])')
	@touch $@

# What they need clashes with what we need (protobuf, for one).
ROUTERS ?= .venv-routers
routers: setup $(ROUTERS)/.ready ## other routers, for pointsman-lab gateway --against

$(ROUTERS)/.ready: pyproject.toml | setup
	@echo "setting up $(ROUTERS) (once; a minute)"
	@test -x $(ROUTERS)/bin/python || $(PYTHON) -m venv $(ROUTERS)
	@$(ROUTERS)/bin/python -m pip install -q --disable-pip-version-check $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["routers"])')
	@touch $@

# Half of them to a fleet that splits prefill and decode. Another run: make fuzz POINTSMAN_FUZZ_SEED=7.
fuzz: setup ## 20,000 hostile requests to two fleets, and properties with new examples; about fifteen minutes
	POINTSMAN_FUZZ_REQUESTS=20000 $(BIN)/pytest tests/security/test_fuzz.py $(ARGS)
	$(BIN)/pytest -q -n 2 --dist loadfile --hypothesis-profile fuzz -m hypothesis tests/unit tests/simulation $(ARGS)

# TRACES has the two trace files. A part, which writes nothing: make results ARGS="--only lag"; into the page: ARGS="--only lag
# --add"; all, small: ARGS="--quick --out /tmp/page".
TRACES ?= ../shared/traces
results: setup ## run every study of docs/results.md; 40 minutes on two cores
	$(BIN)/pointsman-lab results --traces $(TRACES) $(ARGS)

dashboards: setup ## write deploy/observability/dashboards/*.json from their source
	@$(BIN)/python deploy/observability/dashboards.py

COMPILE = $(BIN)/pip-compile -q --strip-extras --generate-hashes --allow-unsafe --no-emit-index-url \
  --no-emit-trusted-host --no-emit-find-links --no-header

# What `make setup` installs, what a container needs and what builds it: with hashes, without index lines.
lock: ## write deploy/requirements*.txt from pyproject.toml
	$(COMPILE) --extra dev --output-file deploy/requirements.txt pyproject.toml deploy/build.in
	$(COMPILE) -c deploy/requirements.txt --extra docker --extra kubernetes --extra postgresql --extra traces \
	  --output-file deploy/requirements-runtime.txt pyproject.toml
	$(COMPILE) -c deploy/requirements.txt --output-file deploy/requirements-build.txt deploy/image.in

settings: setup ## write the names of all processes' settings, which each process knows
	$(BIN)/python -m tests.support.settings_types

KUBECTL ?= $(shell $(BIN)/python -c 'from tests.support.debian_programs import debian_program; print(debian_program("kubectl", "kubectl", "trixie"))')
manifests: setup ## write the Helm chart from deploy/kubernetes, and the PrometheusRule from deploy/observability
	$(BIN)/python deploy/helm/generate.py $(KUBECTL)

# Not part of `make test`: it needs the network. Exit code 2: nothing was audited, since no database was reached.
audit: setup ## look for known vulnerabilities of everything locked
	$(BIN)/python deploy/audit.py deploy/requirements-runtime.txt deploy/requirements-build.txt deploy/requirements.txt

SBOM ?= sbom.cdx.json
sbom: setup ## write the bill of materials of the image's Python packages (CycloneDX)
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --of JSON -o $(SBOM) \
	  deploy/requirements-runtime.txt

clean: ## remove environments, caches and local data
	rm -rf .venv $(CLIENTS) .pointsman .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
