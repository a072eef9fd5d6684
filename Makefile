# Two commands do everything: `make up` runs a fleet, `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup up test test-clients test-vllm mutation lint results lock clean

setup: .venv/.ready

.venv/.ready: deploy/requirements.txt pyproject.toml shared/pointsman_lab/pyproject.toml
	@echo "setting up .venv (once; a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit("Pointsman needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r deploy/requirements.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . -e shared/pointsman_lab
	@touch $@

up: setup
	@$(BIN)/pointsman up $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# First, alone, what measures time; then the rest, two at a time, each file in one process. A part of it: make test ARGS="-k dualmap".
NO_ENGINE := not vllm and not clients
NONE_CHOSEN := 5
test: lint
	$(BIN)/pytest -q -m "$(NO_ENGINE) and quiet" $(ARGS) || test $$? -eq $(NONE_CHOSEN)
	$(BIN)/pytest -n 2 --dist loadfile -m "$(NO_ENGINE) and not quiet" $(ARGS)

# The suite against two real vLLM engines on the CPU. Makes their environment on the first run (docs/engines.md), or takes
# the one in POINTSMAN_VLLM_DIR; a part of it: make test-vllm ARGS="-k chat".
test-vllm: setup
	$(BIN)/pytest -m vllm tests/vllm $(ARGS)

# Small defects, planted one at a time: which of them do tests and torture find? (docs/testing.md) About a quarter of an hour;
# another sample: make mutation ARGS="--sample 50 --seed 7 --only translator".
mutation: setup
	$(BIN)/pointsman-lab mutants $(ARGS)

# Clients as people use them (docs/clients.md), in an environment of their own (1.4 GB), against simulated engines; and
# `vllm bench serve`, where the environment of make test-vllm is there.
CLIENTS ?= .venv-clients
test-clients: setup $(CLIENTS)/.ready
	POINTSMAN_CLIENTS_DIR=$(CLIENTS) $(BIN)/pytest -m clients tests/clients $(ARGS)

$(CLIENTS)/.ready: pyproject.toml | setup
	@echo "setting up $(CLIENTS) (once; some minutes)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])')
	@touch $@

# Every study of docs/results.md (under half an hour on two cores). TRACES has the two trace files. A part, which writes
# nothing: make results ARGS="--only lag"; a taste of all: ARGS=--quick.
TRACES ?= ../shared/traces
results: setup
	$(BIN)/pointsman-lab results --traces $(TRACES) $(ARGS)

COMPILE = $(BIN)/pip-compile -q --strip-extras --generate-hashes --allow-unsafe --no-emit-index-url \
  --no-emit-trusted-host --no-emit-find-links --no-header

# What `make setup` installs, and the part of it that a container needs: with hashes, without index lines.
lock:
	$(COMPILE) --extra dev --output-file deploy/requirements.txt pyproject.toml deploy/build.in
	$(COMPILE) --build-deps-for wheel -c deploy/requirements.txt --output-file deploy/requirements-runtime.txt pyproject.toml

clean:
	rm -rf .venv $(CLIENTS) .pointsman .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
